-- A worker has loaded an adapter, or could not.
--   ARGV   the load's id, the adapter's name, the worker's id, its report in JSON
-- Answers whether the load was waiting for it.
local load = read(LOADS, ARGV[5])
if not load or load.load ~= ARGV[4] or load.state ~= 'loading' then return 0 end
load.workers[ARGV[6]] = cjson.decode(ARGV[7])
write(LOADS, load.name, load)
settle(load)
return 1
