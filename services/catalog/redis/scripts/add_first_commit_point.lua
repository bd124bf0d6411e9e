-- Give a session without a history one: every epoch so far committed its present length.
--
-- KEYS[1]: the session. KEYS[2]: its history.
-- Reply: 1 if it was given one, else 0.
local length = redis.call('HGET', KEYS[1], 'length')
if not length or length == '0' or redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
return redis.call('HSET', KEYS[2], 0, length)
