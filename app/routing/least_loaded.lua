-- Choose the least loaded workers and reserve them, in one step, so that requests that arrive together spread.
--   KEYS   trivet:load:<worker> of the aggregated workers, then of the prefill, then of the decode workers
--   ARGV   now, deadline, request id, number of aggregated, of prefill workers, offset for breaking ties
-- Answers {index of the aggregated worker, 0} or {index of the prefill worker, index of the decode worker}, 1-based in KEYS.
local now, deadline, request = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local whole, prefill, offset = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local function least(first, last)
  local best, load = 0, math.huge
  local count = last - first + 1
  for step = 0, count - 1 do
    local at = first + (step + offset) % count
    redis.call('ZREMRANGEBYSCORE', KEYS[at], '-inf', now)
    local size = redis.call('ZCARD', KEYS[at])
    if size < load then best, load = at, size end
  end
  return best, load
end

-- The key lives as long as its last reservation may.
local function reserve(key)
  redis.call('ZADD', key, deadline, request)
  redis.call('EXPIRE', key, math.max(redis.call('TTL', key), math.ceil(tonumber(deadline) - now) + 1))
end

local a, load_a = least(1, whole)
local p, load_p = least(whole + 1, whole + prefill)
local d, load_d = least(whole + prefill + 1, #KEYS)
local split = p > 0 and d > 0
if a > 0 and (not split or load_a <= math.max(load_p, load_d)) then
  reserve(KEYS[a])
  return {a, 0}
end
if not split then return {0, 0} end
reserve(KEYS[p])
reserve(KEYS[d])
return {p, d}
