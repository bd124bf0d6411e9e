-- List an entry of a tenant's, unless it would be one more than the tenant may have.
--
-- KEYS[1]: sorted set of the tenant's entries.
-- ARGV[1]: score. ARGV[2]: the entry. ARGV[3]: the most entries ('': any number).
-- Reply: -1 if it is listed, else the number of entries, which is the most or more.
if ARGV[3] ~= '' and not redis.call('ZSCORE', KEYS[1], ARGV[2]) then
  local held = redis.call('ZCARD', KEYS[1])
  if held >= tonumber(ARGV[3]) then return held end
end
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
return -1
