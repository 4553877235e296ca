-- Write a response, at once with its lifetime.
--   KEYS   trivet:response:...
--   ARGV   its status, the response in JSON, its input in JSON, the API process that runs it, its life in seconds
redis.call('HSET', KEYS[1], 'status', ARGV[1], 'response', ARGV[2], 'input', ARGV[3], 'api', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
