-- How a load is, or the last one of this name was.
--   ARGV   the name
-- Answers the load in JSON; nothing if there is none.
local load = settled()[ARGV[4]]
return load and cjson.encode(load) or false
