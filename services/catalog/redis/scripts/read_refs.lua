-- Read the references to an owner's pages.
--
-- KEYS: the owner's keys.
-- Reply: {1 if the owner exists; 1 if it has a tombstone; how many pages were retained at the last
--   reconciliation (nil: none took place); the server's Unix seconds; the hash of references}.
return {
  redis.call('EXISTS', KEYS[1]),
  redis.call('EXISTS', KEYS[14]),
  redis.call('HGET', KEYS[14], 'retained'),
  redis.call('TIME')[1],
  redis.call('HGETALL', KEYS[13]),
}
