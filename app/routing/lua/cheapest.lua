-- The candidate of the least cost, less exactly at a temperature: exp(-cost / temperature), costs taken to 0 .. 1.
local function sample(list)
  local low, high = math.huge, -math.huge
  for _, c in ipairs(list) do low, high = math.min(low, c.cost), math.max(high, c.cost) end
  local shares, sum = {}, 0
  for at, c in ipairs(list) do
    shares[at] = math.exp(-(c.cost - low) / math.max(high - low, 1e-9) / weights.temperature)
    sum = sum + shares[at]
  end
  local left = math.random() * sum
  for at, c in ipairs(list) do
    left = left - shares[at]
    if left <= 0 then return c end
  end
  return list[#list]
end

local function cheapest(list)
  -- The load guard: what everybody asks for gets a second holder before its first one is swamped.
  local unhurried = calm(list)
  if #unhurried > 0 then list = unhurried end
  if weights.temperature > 0 then return sample(list) end
  return least(list, weigh)
end
