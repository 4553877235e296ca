-- Take the encoding of an item on, unless somebody holds or encodes it.
--   KEYS   trivet:item:..., trivet:emb:..., trivet:encoding:...
--   ARGV   the claim in JSON, its life in ms, its nonce; worker and incarnation whose claim may be replaced;
--          1 if holders do not count
-- Answers {'held', 'claimed' or 'yours', record or nil, {worker, holder, ...}, claim or nil}.
local record, holders, text = redis.call('GET', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('GET', KEYS[3])
local claim = claim_in(text)
-- A client whose connection broke before the answer came asks again.
if claim and claim.nonce == ARGV[3] then return {'yours', record, holders, text} end
if record and #holders > 0 and ARGV[6] ~= '1' then return {'held', record, holders, text} end
if claim and not (claim.worker == ARGV[4] and claim.incarnation == ARGV[5]) then
  return {'claimed', record, holders, text}
end
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
return {'yours', record, holders, ARGV[1]}
