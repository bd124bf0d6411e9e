-- Add a session to the sorted set of sessions, with the server's time in seconds as its score.
--
-- KEYS[1]  sorted set of sessions
-- ARGV[1]  session
-- ARGV[2]  time to live of the set, milliseconds
-- Reply    1
redis.call('ZADD', KEYS[1], redis.call('TIME')[1], ARGV[1])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
