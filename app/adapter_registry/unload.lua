-- The name stands for nothing any more; a load of it ends, and one that has ended is forgotten.
--   ARGV   the name
-- Answers whether there was anything.
local load = read(LOADS, ARGV[4])
local found = redis.call('HDEL', PUBLISHED, ARGV[4])
if load and load.state == 'loading' then
  found = 1
  finish(load, 'failed', 'the adapter was unloaded meanwhile')
elseif load then
  redis.call('HDEL', LOADS, ARGV[4])
end
tell()
return found
