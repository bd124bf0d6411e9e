-- Set a string if it is absent or has a given value.
--
-- KEYS[1]: the key.
-- ARGV[1]: the new value. ARGV[2]: the value it may replace ('': none). ARGV[3]: milliseconds to
--   live ('': without end).
-- Reply: the value that is set now.
local found = redis.call('GET', KEYS[1])
if found and found ~= ARGV[2] then return found end
if ARGV[3] == '' then
  redis.call('SET', KEYS[1], ARGV[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
end
return ARGV[1]
