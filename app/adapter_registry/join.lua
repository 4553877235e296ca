-- Register a worker, if it holds every adapter that is published.
--   ARGV   its id, its record in JSON, its lease in milliseconds, ids of adapters that it cannot have
-- Answers the ids of those that are missing; none when it is registered.
local record, given_up, held = cjson.decode(ARGV[5]), {}, {}
for at = 7, #ARGV do given_up[ARGV[at]] = true end
for _, id in ipairs(record.adapters) do held[id] = true end
local missing = {}
for _, text in ipairs(redis.call('HVALS', PUBLISHED)) do
  local one = cjson.decode(text)
  local id = one.name .. '@' .. one.version
  if has_to_hold(record) and not held[id] and not given_up[id] then missing[#missing + 1] = id end
end
if #missing > 0 then return missing end
redis.call('SADD', WORKERS, ARGV[4])
redis.call('SET', WORKER .. ARGV[4], ARGV[5], 'PX', ARGV[6])
return {}
