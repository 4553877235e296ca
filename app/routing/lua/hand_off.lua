-- Choose who decodes, once prefill is done, and move the reservation there.
-- Answers as place.lua; nothing when no candidate is alive.

-- Nobody hears of the death of a worker that has no lease any more.
ask.candidates = where(ask.candidates, function(c)
  local record = redis.call('GET', c.record)
  return record and string.find(record, '"incarnation":"' .. c.incarnation .. '"', 1, true)
    and not string.find(record, '"draining":true', 1, true)
end)
if #ask.candidates == 0 then return false end
for _, c in ipairs(ask.candidates) do measure(c) end

local entry = find(KEYS[1], ask.request)
-- Sent twice since an answer was lost.
local chosen = entry and where(ask.candidates, function(c) return is_at(c, entry.places.decode) end)[1]
if chosen then return answer(chosen, {}, step(chosen)) end
chosen = pick(ask.candidates)
local late = step(chosen)
-- Without an entry the request is over, or this Redis has lost it.
if not entry and redis.call('EXISTS', ask.cancelled) == 1 then return answer(chosen, {}, late) end

entry = entry or {turn = 0, places = {}}
drop(entry, 'prefill')
drop(entry, 'decode')
put(entry, 'decode', place_of(chosen))
remember(chosen)
keep(KEYS[1], ask.request, entry)
redis.call('ZADD', KEYS[2], 'NX', 0, ask.owner)
return answer(chosen, {}, late)
