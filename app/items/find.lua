-- What is known of some items; what was looked at lives on.
--   KEYS   for each item trivet:item:..., trivet:emb:... and trivet:encoding:...
--   ARGV   life of records and holders in s
-- Answers, for each item, {record or nil, {worker, holder, ...}, claim or nil}.
local answer = {}
for at = 1, #KEYS, 3 do
  redis.call('EXPIRE', KEYS[at], ARGV[1])
  redis.call('EXPIRE', KEYS[at + 1], ARGV[1])
  local record, holders = redis.call('GET', KEYS[at]), redis.call('HGETALL', KEYS[at + 1])
  answer[#answer + 1] = {record, holders, redis.call('GET', KEYS[at + 2])}
end
return answer
