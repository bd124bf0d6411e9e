-- Reference the first pages of an owner. The reference is unverified until SET_REF or
-- RECONCILE_ORPHANED find that its session exists.
--
-- KEYS: the owner's keys.
-- ARGV[1]: the referencing session. ARGV[2]: number of pages.
-- Reply: the server's Unix seconds, or nil if the pages are gone.
local pages, now = tonumber(ARGV[2]), redis.call('TIME')[1]
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('EXISTS', KEYS[14]) == 0 then return false end
  if redis.call('EXISTS', KEYS[13]) == 0 or pages < 1 then return false end
  local retained = redis.call('HGET', KEYS[14], 'retained')
  if retained and pages > tonumber(retained) then return false end
end
redis.call('ZADD', KEYS[13], 'GT', pages, ARGV[1])
redis.call('ZADD', KEYS[15], now, ARGV[1])
return now
