-- Replace the fields of a conversation that exists.
--
-- KEYS[1]: the conversation. ARGV[1]: the fields.
-- Reply: 1, or 0 if it is unknown.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'fields', ARGV[1])
return 1
