-- Places of requests, and the load of each rank of a worker: totals that only this file changes, so that they always are
-- the sums of the places. A place's name is its stage, or the identity of an item to encode.
local TOTALS = {'requests', 'prefilling', 'prefill_tokens', 'kv_blocks'}

local function load_key(place) -- as app.keys.load
  return string.format('trivet:load:%s:%s:%d', place.worker, place.incarnation, place.rank)
end

local function count(place, sign)
  local key = load_key(place)
  if redis.call('HINCRBY', key, 'requests', sign) <= 0 then return redis.call('DEL', key) end
  for at = 2, #TOTALS do redis.call('HINCRBY', key, TOTALS[at], sign * place[TOTALS[at]]) end
  if place.tenant and redis.call('HINCRBY', key, 'tenant:' .. place.tenant, sign) <= 0 then
    redis.call('HDEL', key, 'tenant:' .. place.tenant)
  end
end

local function find(placed, request)
  local text = redis.call('HGET', placed, request)
  return text and cjson.decode(text) or nil
end

local function keep(placed, request, entry)
  if next(entry.places) == nil then return redis.call('HDEL', placed, request) end
  redis.call('HSET', placed, request, cjson.encode(entry))
end

local function put(entry, name, place)
  entry.places[name] = place
  count(place, 1)
end

local function drop(entry, name)
  local place = entry.places[name]
  if place then count(place, -1) end
  entry.places[name] = nil
end

local function drop_all(entry)
  for name in pairs(entry.places) do drop(entry, name) end
end
