-- A request that is one task has its prompt in the cache: from now on it is decoded.
--   KEYS   trivet:placed:<api>
--   ARGV   request
local entry = find(KEYS[1], ARGV[1])
local place = entry and entry.places.whole
if not place or place.prefilling == 0 then return end
drop(entry, 'whole')
place.prefilling, place.prefill_tokens = 0, 0
put(entry, 'whole', place)
keep(KEYS[1], ARGV[1], entry)
