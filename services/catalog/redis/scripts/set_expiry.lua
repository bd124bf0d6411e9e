-- List a session to expire so long from now, by this server's clock.
--
-- KEYS[1]: sorted set of a tenant's sessions by the time of their expiry.
-- ARGV[1]: the session. ARGV[2]: its lifetime in seconds.
-- Reply: an integer without meaning.
local now = redis.call('TIME')
local at = tonumber(now[1]) + tonumber(now[2]) / 1e6 + tonumber(ARGV[2])
return redis.call('ZADD', KEYS[1], string.format('%.6f', at), ARGV[1])
