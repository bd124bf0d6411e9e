-- Run one command.
--
-- KEYS[1]: the key that it is routed by.
-- ARGV: the command's words, keys included.
-- Reply: the command's.
return redis.call(unpack(ARGV))
