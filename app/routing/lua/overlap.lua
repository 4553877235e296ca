-- How much of the prompt a candidate has: the longest prefix of its chain of blocks, by binary search.
local DIGITS = 16
local blocks = #chain / DIGITS

local function name(number)
  return string.sub(chain, DIGITS * (number - 1) + 1, DIGITS * number)
end

local function has(key, number)
  return redis.call('SISMEMBER', key, name(number)) == 1
end

-- A block is in an engine's cache only with those before it, so what is in a set is a prefix, and a binary search finds
-- its end. A look at a large set costs about a microsecond, whatever else is asked in the same call.

-- The last of the numbers first .. last whose name is in the set, where that of `first` is. `at` are block numbers by
-- these numbers, if they are not the same.
local function search(key, first, last, at)
  local outside = last + 1
  while outside - first > 1 do
    local middle = math.floor((first + outside) / 2)
    if has(key, at and at[middle] or middle) then first = middle else outside = middle end
  end
  return first
end

local function held(c)
  if not c.kv or blocks == 0 or not has(c.kv, 1) then return 0 end
  return search(c.kv, 1, blocks)
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

-- Blocks that are predicted, if they are more than the `least` that are held.
local function predicted(c, least)
  if least == blocks then return 0 end
  local beyond = 1
  while noted[beyond] and noted[beyond] <= least do beyond = beyond + 1 end
  local best = 0
  for _, key in ipairs({notes(c)}) do
    local found = redis.call('SMISMEMBER', key, name(blocks), name(noted[beyond] or blocks))
    if found[1] == 1 then return blocks end
    if found[2] == 1 then best = math.max(best, noted[search(key, beyond, #noted, noted)]) end
  end
  return best
end

local function expects(c, identity)
  for _, key in ipairs({notes(c)}) do
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
  for first = 1, #names, 1000 do
    redis.call('SADD', new, unpack(names, first, math.min(first + 999, #names)))
  end
  redis.call('EXPIRE', new, 2 * ask.predicted_s)
end
