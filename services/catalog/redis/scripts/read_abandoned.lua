-- Read the creations that began long ago, or later than now: then the clock was set back.
--
-- KEYS[1]: the creations, by the server's Unix seconds.
-- ARGV[1]: seconds.
-- Reply: the sessions.
local now = redis.call('TIME')[1]
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1])
for _, session in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now + ARGV[1], '+inf')) do
  found[#found + 1] = session
end
return found
