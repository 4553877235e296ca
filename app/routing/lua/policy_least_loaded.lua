local function pick(list)
  return least(list, function(c) return c.requests end)
end
