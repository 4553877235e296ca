-- Give places of a request back; those that it does not have (any more) change nothing.
--   KEYS   trivet:placed:<api>
--   ARGV   request, names of places; none for all
local entry = find(KEYS[1], ARGV[1])
if not entry then return end
if #ARGV == 1 then drop_all(entry) end
for at = 2, #ARGV do drop(entry, ARGV[at]) end
keep(KEYS[1], ARGV[1], entry)
