-- Choose who prefills, and whether the same worker decodes, and who encodes; reserve it, in one step, so that requests
-- that arrive together spread.
-- Answers {stage, worker, incarnation, rank, encode: {identity: {worker, incarnation}}, candidates, step} in JSON.
local entry = not ask.dry and find(KEYS[1], ask.request) or nil
-- Sent twice since an answer was lost, or overtaken by a later attempt that somebody is using.
local again = entry and entry.turn >= ask.turn
if entry and not again then
  drop_all(entry)
  entry = nil
end

for _, c in ipairs(ask.candidates) do measure(c) end
local function of(stage)
  return where(ask.candidates, function(c) return c.stage == stage end)
end
local first = path(of('whole'), of('prefill'), of('decode'))

if again then
  local place = entry.places.whole or entry.places.prefill
  local chosen = where(ask.candidates, function(c) return is_at(c, place) and c.stage ~= 'decode' end)[1]
  if chosen then return answer(chosen, placed_items(entry), step(chosen)) end
end

local chosen = pick(first)
local late = step(chosen)
if ask.dry then return answer(chosen, place_items(nil), late) end
entry = entry or {turn = ask.turn, places = {}}
drop_all(entry)
put(entry, chosen.stage, place_of(chosen))
remember(chosen)
local encode = place_items(entry)
keep(KEYS[1], ask.request, entry)
redis.call('ZADD', KEYS[2], 'NX', 0, ask.owner)
return answer(chosen, encode, late)
