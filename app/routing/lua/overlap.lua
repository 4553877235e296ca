-- How much of the prompt a candidate has: the longest prefix of its chain of blocks, by binary search.
local DIGITS = 16
local blocks = #chain / DIGITS

local function name(number)
  return string.sub(chain, DIGITS * (number - 1) + 1, DIGITS * number)
end

local function has(key, number)
  return redis.call('SISMEMBER', key, name(number)) == 1
end

-- The last of `positions` (ascending) that is in the set, looked for from index `first` on; 0 if that one is not.
-- A block is in an engine's cache only with those before it, so what is in the set is a prefix.
local function last(key, positions, first)
  if not positions[first] or not has(key, positions[first]) then return 0 end
  local inside, outside = first, #positions + 1
  while outside - inside > 1 do
    local middle = math.floor((inside + outside) / 2)
    if has(key, positions[middle]) then inside = middle else outside = middle end
  end
  return positions[inside]
end

local every = {}
for number = 1, blocks do every[number] = number end

local function held(c)
  if blocks == 0 or not c.kv then return 0 end
  if has(c.kv, blocks) then return blocks end
  return last(c.kv, every, 1)
end

-- Of a chain that was sent to a worker not all names are noted: the first 16, then 8 in each doubling, and the last. So
-- an equal prompt is found whole, and of another one at most an eighth of what they share is missed.
local noted = {}
do
  local number, stride = 1, 1
  while number <= blocks do
    noted[#noted + 1] = number
    if number >= 16 * stride then stride = 2 * stride end
    number = number + stride
  end
end

-- Two generations of notes live at a time, so that all of one are forgotten at once.
local generation = math.floor(tonumber(redis.call('TIME')[1]) / ask.predicted_s)

local function notes(c)
  return string.format('%s%d', c.predicted_prefix, generation), string.format('%s%d', c.predicted_prefix, generation - 1)
end

local function living_notes(c)
  if not c.notes then
    c.notes = where({notes(c)}, function(key) return redis.call('EXISTS', key) == 1 end)
  end
  return c.notes
end

local function predicted(c, least)
  local best = least
  if blocks == 0 then return 0 end
  for _, key in ipairs(living_notes(c)) do
    if has(key, blocks) then return blocks end
    local first = 1
    while noted[first] and noted[first] <= best do first = first + 1 end
    best = math.max(best, last(key, noted, first))
  end
  return best > least and best or 0
end

local function expects(c, identity)
  for _, key in ipairs(living_notes(c)) do
    if redis.call('SISMEMBER', key, identity) == 1 then return true end
  end
  return false
end

local function note(c)
  local new, old = notes(c)
  local names = {}
  for at, number in ipairs(noted) do names[at] = name(number) end
  if blocks > 0 then names[#names + 1] = name(blocks) end
  for _, item in ipairs(ask.items) do names[#names + 1] = item.identity end
  if #names == 0 then return end
  if redis.call('SCARD', new) + #names > ask.max_predicted then
    redis.call('UNLINK', old)
    if redis.call('EXISTS', new) == 1 then redis.call('RENAME', new, old) end
  end
  redis.call('SADD', new, unpack(names))
  redis.call('EXPIRE', new, 2 * ask.predicted_s)
end
