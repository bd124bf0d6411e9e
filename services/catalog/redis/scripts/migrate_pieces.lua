-- Give the pieces of a tool's output fields of their own, which lay in the call until version 2.
--
-- KEYS[1]: the hash of calls.
-- ARGV[1]: the call's field. ARGV[2]: the value read. ARGV[3]: the new value. Then pairs of the name
--   and the text of a piece.
-- Reply: 0 if it was done, 1 if the call had changed since and was left alone.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 1 end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 0
