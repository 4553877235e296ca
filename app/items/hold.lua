-- Name one more holder of an item.
--   KEYS   trivet:emb:...
--   ARGV   worker, holder, life in s
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
