-- Comes before every script of this folder. An object that was written as JSON; an empty one for whatever is none.
local function object(text)
  local read, value = pcall(cjson.decode, text or '')
  return read and type(value) == 'table' and value or {}
end

-- A claim; nil for none, and for what says no owner.
local function claim_in(text)
  local claim = object(text)
  return type(claim.worker) == 'string' and type(claim.incarnation) == 'string' and claim or nil
end
