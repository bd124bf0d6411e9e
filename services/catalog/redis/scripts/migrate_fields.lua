-- Replace fields of a hash, each only if it still has the value that was read.
--
-- KEYS[1]: the hash.
-- ARGV: groups of the field's name, the value read, its new name and its new value.
-- Reply: number of fields that had changed since and were left alone.
local changed = 0
for i = 1, #ARGV, 4 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    if ARGV[i] ~= ARGV[i + 2] then redis.call('HDEL', KEYS[1], ARGV[i]) end
    redis.call('HSET', KEYS[1], ARGV[i + 2], ARGV[i + 3])
  else
    changed = changed + 1
  end
end
return changed
