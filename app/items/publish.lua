-- Say that an item is encoded: its record, its holder, no claim any more, and the announcement, in one step.
--   KEYS   trivet:item:..., trivet:emb:..., trivet:encoding:...
--   ARGV   worker, incarnation, record, holder, life of both in s, channel, announcement
redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[5])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[5])
local claim = claim_in(redis.call('GET', KEYS[3]))
if not claim or (claim.worker == ARGV[1] and claim.incarnation == ARGV[2]) then redis.call('DEL', KEYS[3]) end
redis.call('PUBLISH', ARGV[6], ARGV[7])
