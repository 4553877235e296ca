-- Where the session was before; the cheapest for its first request, when that worker is gone, or overloaded.
local function pick(list)
  if not ask.session then return cheapest(list) end
  local kept = redis.call('HGET', ask.session, ask.kind)
  local found = where(list, function(c) return c.load == kept and not c.overloaded end)
  local chosen = found[1] or cheapest(list)
  if not ask.dry then
    redis.call('HSET', ask.session, ask.kind, chosen.load)
    redis.call('EXPIRE', ask.session, ask.session_s)
  end
  return chosen
end
