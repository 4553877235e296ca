-- In turn, for all API processes together.
local function pick(list)
  local turn = tonumber(redis.call('HGET', ask.turns, ask.kind) or 0)
  if not ask.dry then
    redis.call('HINCRBY', ask.turns, ask.kind, 1)
    redis.call('EXPIRE', ask.turns, ask.session_s)
  end
  return list[turn % #list + 1]
end
