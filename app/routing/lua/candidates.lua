-- The candidates with what is placed on them, and the answer's form.
local function measure(c)
  local found = redis.call('HMGET', c.load, 'requests', 'prefilling', 'prefill_tokens', 'kv_blocks', 'tenant:' .. ask.tenant)
  c.requests, c.prefilling = tonumber(found[1] or 0), tonumber(found[2] or 0)
  c.prefill_tokens, c.kv_blocks = tonumber(found[3] or 0), tonumber(found[4] or 0)
  c.of_tenant = tonumber(found[5] or 0)
  local tokens = c.stage == 'prefill' and ask.tokens or ask.tokens + ask.answer_tokens
  c.own_blocks = math.max(1, math.ceil(tokens / c.block_size))
  appraise(c)
end

local function place_of(c)
  return {
    worker = c.worker, incarnation = c.incarnation, rank = c.rank, kv_blocks = c.own_blocks,
    prefilling = c.stage == 'decode' and 0 or 1, prefill_tokens = c.stage == 'decode' and 0 or c.own_tokens,
    tenant = ask.tenant,
  }
end

local function is_at(c, place)
  return place ~= nil and load_key(place) == c.load
end

local function row(c, chosen)
  return {
    stage = c.stage, worker = c.worker, incarnation = c.incarnation, rank = c.rank, held = c.held,
    predicted = c.predicted, requests = c.requests, prefilling = c.prefilling, prefill_tokens = c.prefill_tokens,
    kv_blocks = c.kv_blocks, embedding_bytes = c.embedding_bytes, cost = c.cost, overloaded = c.overloaded,
    chosen = chosen == c,
  }
end

local function answer(chosen, encode, late)
  local rows = {}
  for at, c in ipairs(ask.candidates) do rows[at] = row(c, chosen) end
  return cjson.encode({
    stage = chosen.stage, worker = chosen.worker, incarnation = chosen.incarnation, rank = chosen.rank,
    encode = encode, candidates = rows, step = late,
  })
end
