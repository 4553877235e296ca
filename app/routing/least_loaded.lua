-- Choose the least loaded workers and reserve them, in one step, so that requests that arrive together spread; and for
-- each item that nobody holds or encodes yet an encode worker, with the claim on the item.
--   KEYS   trivet:load:<worker> of the aggregated, the prefill, the decode and the encode workers;
--          then for each item trivet:emb:... and trivet:encoding:...
--   ARGV   now, deadline, request id, offset for breaking ties, life of a claim in ms,
--          number of aggregated, prefill, decode and encode workers;
--          then each encode worker's assignment in JSON; then each item's identity
-- Answers {index of the aggregated worker, 0, ...} or {index of the prefill worker, index of the decode worker, ...},
-- followed by an index for each item, 0 for one that needs no encode worker. Indices are 1-based in KEYS.
local now, deadline, request = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local offset, claim_ms = tonumber(ARGV[4]), ARGV[5]
local whole, prefill, decode, encode = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local workers = whole + prefill + decode + encode
local first_encoder = whole + prefill + decode + 1

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
local function reserve(key, place)
  redis.call('ZADD', key, deadline, place)
  redis.call('EXPIRE', key, math.max(redis.call('TTL', key), math.ceil(tonumber(deadline) - now) + 1))
end

local function place()
  local a, load_a = least(1, whole)
  local p, load_p = least(whole + 1, whole + prefill)
  local d, load_d = least(whole + prefill + 1, whole + prefill + decode)
  local split = p > 0 and d > 0
  if a > 0 and (not split or load_a <= math.max(load_p, load_d)) then
    reserve(KEYS[a], request)
    return a, 0
  end
  if not split then return 0, 0 end
  reserve(KEYS[p], request)
  reserve(KEYS[d], request)
  return p, d
end

-- Whom the claim is on, as an index: 0 when another request made it, nil when there is none. A script that was sent
-- twice, since its answer was lost, finds its own.
local function claimed(key)
  local found = redis.call('GET', key)
  if not found then return nil end
  local read, owner = pcall(cjson.decode, found)
  if not read or type(owner) ~= 'table' or owner.request ~= request then return 0 end
  for at = first_encoder, workers do
    local assignment = cjson.decode(ARGV[9 + at - first_encoder + 1])
    if assignment.worker == owner.worker and assignment.incarnation == owner.incarnation then return at end
  end
  return 0
end

local first, second = place()
local answer = {first, second}
if first == 0 or encode == 0 then return answer end
for item = 1, (#KEYS - workers) / 2 do
  local held, claim = KEYS[workers + 2 * item - 1], KEYS[workers + 2 * item]
  local chosen = 0
  if redis.call('EXISTS', held) == 0 then
    chosen = claimed(claim)
    if not chosen then
      chosen = least(first_encoder, workers)
      local owner = cjson.decode(ARGV[9 + chosen - first_encoder + 1])
      owner.request = request
      redis.call('SET', claim, cjson.encode(owner), 'PX', claim_ms)
      reserve(KEYS[chosen], request .. '/' .. ARGV[9 + encode + item])
    end
  end
  answer[2 + item] = chosen
end
return answer
