-- Write how a response goes on, or how it ended, unless it ended before or is gone.
--   KEYS   trivet:response:...
--   ARGV   its status, the response in JSON, its life in seconds
-- Answers 1 if it was written.
local now = redis.call('HGET', KEYS[1], 'status')
if now ~= 'queued' and now ~= 'in_progress' then return 0 end
redis.call('HSET', KEYS[1], 'status', ARGV[1], 'response', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
