-- Give the encoding of an item up and say why. Who lost the claim to another only tells what holds for that one, too.
--   KEYS   trivet:encoding:...
--   ARGV   worker, incarnation, 1 if the failure is final, channel, announcement
local claim = claim_in(redis.call('GET', KEYS[1]))
local ours = not claim or (claim.worker == ARGV[1] and claim.incarnation == ARGV[2])
if ours then redis.call('DEL', KEYS[1]) end
if ours or ARGV[3] == '1' then redis.call('PUBLISH', ARGV[4], ARGV[5]) end
