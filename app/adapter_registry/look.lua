-- What a worker should hold, after all loads have been settled.
--   ARGV   the prefix of trivet:lora-users:<model>:<adapter>, ids of adapters that it holds
-- Answers {published: {name: ...}, loads: {name: ...}, users: {id: number}, left: {name: seconds}} in JSON.
local found = {published = {}, loads = settled(), users = {}, left = {}}
local entries = redis.call('HGETALL', PUBLISHED)
for at = 1, #entries, 2 do found.published[entries[at]] = cjson.decode(entries[at + 1]) end
for name, load in pairs(found.loads) do found.left[name] = math.max(0, load.deadline - now) end
for at = 5, #ARGV do
  found.users[ARGV[at]] = redis.call('ZCOUNT', ARGV[4] .. ARGV[at], '(' .. tostring(math.floor(now)), '+inf')
end
return cjson.encode(found)
