-- Give the places back of API processes that are gone, a bounded number at a time.
--   KEYS   trivet:owners
--   ARGV   seconds that one has to be gone for, most requests at a time, prefixes of trivet:api:... and trivet:placed:...
-- Answers how many requests that were.
local now, left = tonumber(redis.call('TIME')[1]), tonumber(ARGV[2])
local owners = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')

local function clear(owner)
  local placed = ARGV[4] .. owner
  local entries = redis.call('HRANDFIELD', placed, left, 'WITHVALUES')
  for at = 1, #entries, 2 do
    drop_all(cjson.decode(entries[at + 1]))
    redis.call('HDEL', placed, entries[at])
  end
  left = left - #entries / 2
  if redis.call('EXISTS', placed) == 0 then redis.call('ZREM', KEYS[1], owner) end
end

for at = 1, #owners, 2 do
  local owner, since = owners[at], tonumber(owners[at + 1])
  if redis.call('EXISTS', ARGV[3] .. owner) == 1 then
    if since > 0 then redis.call('ZADD', KEYS[1], 0, owner) end
  elseif since == 0 then
    -- A Redis that was restarted empty hears of an API only with its next heartbeat.
    redis.call('ZADD', KEYS[1], now, owner)
  elseif now - since >= tonumber(ARGV[1]) and left > 0 then
    clear(owner)
  end
end
return tonumber(ARGV[2]) - left
