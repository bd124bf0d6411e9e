-- Replace entries of a list, each only if it still has the value that was read.
--
-- KEYS[1]: the list.
-- ARGV: triples of an index, the value read and the new value.
-- Reply: number of entries that had changed since and were left alone.
local changed = 0
for i = 1, #ARGV, 3 do
  if redis.call('LINDEX', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    redis.call('LSET', KEYS[1], ARGV[i], ARGV[i + 2])
  else
    changed = changed + 1
  end
end
return changed
