-- Name a holder of some items no more, if it still is the one that was meant.
--   KEYS   trivet:emb:... of each item
--   ARGV   worker, incarnation and nonce of the entry; empty for any
-- Answers how many entries were removed.
local removed = 0
for _, key in ipairs(KEYS) do
  local holder = object(redis.call('HGET', key, ARGV[1]))
  local descriptor = type(holder.descriptor) == 'table' and holder.descriptor or {}
  local meant = ARGV[2] == '' or holder.incarnation == ARGV[2]
  if meant and (ARGV[3] == '' or descriptor.nonce == ARGV[3]) then
    removed = removed + redis.call('HDEL', key, ARGV[1])
  end
end
return removed
