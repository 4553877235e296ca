-- The priority of a message to a candidate that has more than it runs at once: the later step for a request of low
-- priority, and for a tenant that has more than its share of what is placed there.
local function step(c)
  if c.requests < c.concurrency then return 0 end
  if ask.priority > 0 then return ask.late end
  local tenants = redis.call('HLEN', c.load) - #TOTALS
  local share = (c.requests + 1) / math.max(1, tenants + (c.of_tenant == 0 and 1 or 0))
  return c.of_tenant + 1 > share and ask.late or 0
end
