-- An encode worker, with the claim, for each item that nobody holds or encodes yet: the one with the shortest queue, of
-- equals always the same one for an item.

-- Whom the claim is on: nil when there is none, false when another request made it. A script that was sent twice, since
-- its answer was lost, finds its own.
local function claimed(item)
  local found = redis.call('GET', item.claim)
  if not found then return nil end
  local read, owner = pcall(cjson.decode, found)
  if not read or type(owner) ~= 'table' or owner.request ~= ask.request then return false end
  for _, one in ipairs(ask.encoders) do
    if one.worker == owner.worker and one.incarnation == owner.incarnation then return one end
  end
  return false
end

local function encoder(item)
  local best, short, high
  for _, one in ipairs(ask.encoders) do
    local queue, affinity = tonumber(redis.call('HGET', one.load, 'requests') or 0), redis.sha1hex(item.identity .. one.worker)
    if not best or queue < short or queue == short and affinity > high then best, short, high = one, queue, affinity end
  end
  return best
end

local function reserve(entry, item, one, claims)
  put(entry, item.identity, {
    worker = one.worker, incarnation = one.incarnation, rank = 0, prefilling = 0, prefill_tokens = 0, kv_blocks = 0,
  })
  if not claims then return end
  local claim = {worker = one.worker, incarnation = one.incarnation, request = ask.request}
  redis.call('SET', item.claim, cjson.encode(claim), 'PX', ask.claim_ms)
end

local function named(one)
  return {worker = one.worker, incarnation = one.incarnation}
end

-- Answers item -> worker and incarnation. Without `entry` nothing is reserved or claimed.
local function place_items(entry)
  local chosen = {}
  if #ask.encoders == 0 then return chosen end
  for _, item in ipairs(ask.items) do
    if redis.call('EXISTS', item.held) == 0 then
      local own = claimed(item)
      local one = own == nil and encoder(item) or own
      if one and entry then reserve(entry, item, one, own == nil) end
      if one then chosen[item.identity] = named(one) end
    end
  end
  return chosen
end

local function placed_items(entry)
  local chosen = {}
  for _, item in ipairs(ask.items) do
    local place = entry.places[item.identity]
    if place then chosen[item.identity] = named(place) end
  end
  return chosen
end
