local function pick(list)
  return list[math.random(#list)]
end
