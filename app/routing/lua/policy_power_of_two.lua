-- The less loaded of two by chance.
local function pick(list)
  local at = math.random(#list)
  local one = list[at]
  if #list == 1 then return one end
  local other = list[(at - 1 + math.random(#list - 1)) % #list + 1]
  return other.requests < one.requests and other or one
end
