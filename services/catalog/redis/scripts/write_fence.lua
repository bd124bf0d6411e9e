-- Write, and leave nothing, so that a WAIT after it waits for all that was written before.
--
-- KEYS[1]: a key that nothing else has.
-- Reply: 1, or 0 of a server without memory, which has written nothing.
redis.pcall('SET', KEYS[1], '')
return redis.call('DEL', KEYS[1])
