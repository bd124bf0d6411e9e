-- Note that a session is being created.
--
-- KEYS[1]: the creations, by the server's Unix seconds.
-- ARGV[1]: the session.
-- Reply: an integer without meaning.
return redis.call('ZADD', KEYS[1], redis.call('TIME')[1], ARGV[1])
