-- Whether a request is one task or two, where both can be. Conditional disaggregation: a prompt with little to prefill
-- is not worth the way over two workers; any other goes where it costs less, and two take as long as the slower one.
local function calm(list)
  return where(list, function(c) return not c.overloaded end)
end

local function is_light(c)
  if ask.tokens == 0 then return false end
  return c.own_tokens <= weights.local_prefill_max_tokens
    or c.overlap * c.block_size >= weights.local_prefill_cached_ratio * ask.tokens
end

-- The candidates of the first task.
local function path(whole, prefill, decode)
  if #whole == 0 then return prefill end
  if #prefill == 0 or #decode == 0 then return whole end
  local one, two = #calm(whole) > 0, #calm(prefill) > 0 and #calm(decode) > 0
  if one ~= two then return one and whole or prefill end
  if #where(whole, is_light) > 0 then return whole end
  local slower = math.max(weigh(least(prefill, weigh)), weigh(least(decode, weigh)))
  return weigh(least(whole, weigh)) <= slower and whole or prefill
end
