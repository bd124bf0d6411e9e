-- Sort the references to an owner's pages, which were a hash until version 2, by pages and by time.
--
-- KEYS[1]: the references. KEYS[2]: the unverified ones.
-- ARGV: none.
-- Reply: number of references that were moved.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return 0 end
local entries = redis.call('HGETALL', KEYS[1])
redis.call('DEL', KEYS[1])
for i = 1, #entries, 2 do
  local pages, since = string.match(entries[i + 1], '^(%d+) (%d+)$')
  redis.call('ZADD', KEYS[1], pages, entries[i])
  redis.call('ZADD', KEYS[2], since, entries[i])
end
return #entries / 2
