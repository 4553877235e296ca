-- What a candidate would cost: app.routing.router has the formula. Defines `appraise`, `remember`.
local MIB = 1024 * 1024

-- Who holds an item's embedding: bytes of it, and worker -> incarnation; whoever is about to encode it counts, too.
local function look_up(item)
  item.bytes, item.at = nil, {}
  local holders = redis.call('HGETALL', item.held)
  for at = 1, #holders, 2 do
    item.at[holders[at]] = string.match(holders[at + 1], '"incarnation": ?"([^"]*)"')
    item.bytes = item.bytes or tonumber(string.match(holders[at + 1], '"nbytes": ?(%d+)') or nil)
  end
  local claim = redis.call('GET', item.claim)
  if claim then
    local worker, incarnation = string.match(claim, '"worker": ?"([^"]*)"'), string.match(claim, '"incarnation": ?"([^"]*)"')
    if worker then item.at[worker] = incarnation end
  end
end
for _, item in ipairs(ask.items) do look_up(item) end

local function bytes_to_move(c)
  local bytes = 0
  if c.stage == 'decode' then return bytes end
  for _, item in ipairs(ask.items) do
    local here = item.at[c.worker] == c.incarnation or not item.bytes and expects(c, item.identity)
    if not here then
      bytes = bytes + (item.bytes or weights.unknown_embedding_bytes)
    end
  end
  return bytes
end

local function appraise(c)
  c.held = held(c)
  c.predicted = predicted(c, c.held)
  c.overlap = math.max(c.held, c.predicted)
  c.embedding_bytes = bytes_to_move(c)
  c.own_tokens = math.max(0, ask.tokens - c.overlap * c.block_size)
  c.overloaded = c.prefilling >= weights.max_queue
    or c.kv_blocks > weights.active_decode_blocks_threshold * c.kv_capacity
  local credited = math.max(0, ask.tokens - weights.overlap_credit * c.overlap * c.block_size)
  local work
  if c.stage == 'decode' then
    work = weights.transfer_weight * credited / c.block_size
  else
    work = weights.prefill_load_scale * (weights.queue_weight * c.prefill_tokens + credited) / c.block_size
  end
  c.cost = work + c.kv_blocks + c.own_blocks + weights.active_request_weight * c.requests
    + weights.embedding_weight * c.embedding_bytes / MIB + c.adapter_cost
end

local remember = note

-- What is compared between one task and two.
local function weigh(c) return c.cost end
