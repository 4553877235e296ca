-- Begin a load, or join one of the same name from the same place.
--   ARGV   its id, the adapter's name, where it is, seconds that it may take
-- Answers the load in JSON; nothing when there is no worker to load it.
local id, name, uri, limit = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local load = settled()[name]
if load and load.state == 'loading' then return cjson.encode(load) end
if next((live())) == nil then return false end
load = {
  load = id, name = name, uri = uri, state = 'loading', begun = now, deadline = now + limit, workers = {}, waiting = {},
  failing = 0, deserted = 0,
}
progress(load)
write(LOADS, name, load)
tell()
return cjson.encode(load)
