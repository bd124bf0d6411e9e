-- Note that the workers have deleted a deleted owner's orphaned pages.
--
-- KEYS: the owner's keys.
-- ARGV[1]: number of pages that were retained then.
-- Reply: 0.
if redis.call('HGET', KEYS[14], 'retained') == ARGV[1] then
  redis.call('HDEL', KEYS[14], 'due')
end
return 0
