-- Reference the first pages of an owner.
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
local before = string.match(redis.call('HGET', KEYS[13], ARGV[1]) or '0', '^%d+')
redis.call('HSET', KEYS[13], ARGV[1], math.max(pages, tonumber(before)) .. ' ' .. now)
return now
