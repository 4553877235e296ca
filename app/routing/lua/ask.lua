-- Comes first: what is asked, as app.routing.asking writes it. Names of keys are in it, made by app.keys.
--   KEYS   trivet:placed:<api>, trivet:owners
--   ARGV   the request and its candidates, in JSON; the names of the prompt's blocks, without anything between them
local ask, chain = cjson.decode(ARGV[1]), ARGV[2]
local weights = ask.weights
math.randomseed(ask.seed)

local function where(list, test)
  local found = {}
  for _, one in ipairs(list) do
    if test(one) then found[#found + 1] = one end
  end
  return found
end

-- The ones with the least value, one of them by chance.
local function least(list, value)
  local best, low = {}, math.huge
  for _, one in ipairs(list) do
    local now = value(one)
    if now < low then best, low = {one}, now elseif now == low then best[#best + 1] = one end
  end
  return best[math.random(math.max(1, #best))]
end
