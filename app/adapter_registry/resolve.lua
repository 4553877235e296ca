-- The adapter that a name stands for now; the request counts among its users until it ends.
--   ARGV   the prefix of trivet:lora-users:<model>:<adapter>, the name, the request, its deadline in unix seconds
-- Answers the adapter's id; `loading` while the name is being loaded for the first time; nothing if it is unknown.
local name, request, deadline = ARGV[5], ARGV[6], tonumber(ARGV[7])
local load = read(LOADS, name)
if load then settle(load) end
local published = read(PUBLISHED, name)
if not published then return load and load.state == 'loading' and 'loading' or false end
local id = published.name .. '@' .. published.version
local users = ARGV[4] .. id
redis.call('ZREMRANGEBYSCORE', users, '-inf', now)
redis.call('ZADD', users, math.ceil(deadline), request)
redis.call('EXPIRE', users, math.max(redis.call('TTL', users), math.ceil(deadline - now) + 60))
return id
