-- What all scripts of adapters have in common.
--   KEYS   trivet:lora:<model>, trivet:lora-loads:<model>, trivet:workers
--   ARGV   the model, the channel, the prefix of trivet:worker:<id>; from the fourth on, each script's own
local PUBLISHED, LOADS, WORKERS = KEYS[1], KEYS[2], KEYS[3]
local MODEL, CHANNEL, WORKER = ARGV[1], ARGV[2], ARGV[3]
-- Seconds that a load goes on after a first failure, so that its end has everybody's reason; that it goes on without any
-- worker; and that its end is kept.
local OTHERS_S, DESERTED_S, KEPT_S = 2, 5, 600

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

local function read(key, name)
  local text = redis.call('HGET', key, name)
  return text and cjson.decode(text) or nil
end

local function write(key, name, value)
  redis.call('HSET', key, name, cjson.encode(value))
end

local function tell()
  redis.call('PUBLISH', CHANNEL, MODEL)
end

local function has_to_hold(record)
  if record.model ~= MODEL or record.draining then return false end
  for _, role in ipairs(record.roles) do
    if role ~= 'encode' then return true end
  end
  return false
end

-- The live workers that have to hold every adapter, and those that are about to leave: id -> incarnation.
local function live()
  local found, leaving = {}, {}
  for _, id in ipairs(redis.call('SMEMBERS', WORKERS)) do
    local text = redis.call('GET', WORKER .. id)
    local record = text and cjson.decode(text)
    if record and has_to_hold(record) then
      found[id] = record.incarnation
    elseif record and record.draining then
      leaving[id] = record.incarnation
    end
  end
  return found, leaving
end

-- How far a load is: whether some have not spoken, whether one failed, and the reports of the others. A worker that
-- failed has failed, also if it is late with its heartbeat; only a new incarnation of it can do better. One that drains
-- gets no more requests: what it says is forgotten. Notes since when there has been nobody.
local function progress(load)
  load.waiting = {}
  local failed, loaded, workers, leaving = false, {}, live()
  if next(workers) then
    load.deserted = 0
  elseif load.deserted == 0 then
    load.deserted = now
  end
  for id, incarnation in pairs(leaving) do
    local report = load.workers[id]
    if report and report.incarnation == incarnation then load.workers[id] = nil end
  end
  for id, incarnation in pairs(workers) do
    local report = load.workers[id]
    if not report or report.incarnation ~= incarnation then
      load.waiting[id] = true
    elseif report.state == 'loaded' then
      loaded[#loaded + 1] = report
    end
  end
  for id, report in pairs(load.workers) do
    local now_there = workers[id]
    if report.state == 'failed' and (not now_there or now_there == report.incarnation) then failed = true end
  end
  return next(load.waiting) ~= nil, failed, loaded
end

local function finish(load, state, reason)
  load.state, load.reason, load.ended = state, reason, now
  write(LOADS, load.name, load)
  tell()
end

local function publish(load, report)
  local before = read(PUBLISHED, load.name)
  load.version, load.unchanged = report.version, before ~= nil and before.version == report.version
  write(PUBLISHED, load.name, {
    name = load.name, version = report.version, uri = load.uri, rank = report.rank, size = report.size,
    load = load.load, at = now,
  })
  finish(load, 'published', '')
end

local function same(reports)
  for _, report in ipairs(reports) do
    if report.version ~= reports[1].version then return false end
  end
  return true
end

-- End the load if there is nothing to wait for.
local function settle(load)
  if load.state ~= 'loading' then return end
  local waits, failed, loaded = progress(load)
  if failed then
    if load.failing == 0 then load.failing = now end
    if not waits or now - load.failing >= OTHERS_S then return finish(load, 'failed', 'a worker could not load it') end
  elseif not same(loaded) then
    return finish(load, 'failed', 'its content changed while workers fetched it')
  elseif #loaded > 0 and not waits then
    return publish(load, loaded[1])
  elseif load.deserted > 0 and now - load.deserted >= DESERTED_S then
    return finish(load, 'failed', 'all workers that could load it are gone')
  end
  if now >= load.deadline then return finish(load, 'failed', 'not all workers had it in time') end
  write(LOADS, load.name, load)
end

-- All loads, settled: name -> load. Those that ended long ago are forgotten.
local function settled()
  local found = {}
  local entries = redis.call('HGETALL', LOADS)
  for at = 1, #entries, 2 do
    local load = cjson.decode(entries[at + 1])
    settle(load)
    if load.state ~= 'loading' and now - load.ended > KEPT_S then
      redis.call('HDEL', LOADS, load.name)
    else
      found[load.name] = load
    end
  end
  return found
end
