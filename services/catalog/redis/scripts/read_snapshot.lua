-- Read what a fork at the end of a turn starts from.
--
-- KEYS: the parent's keys.
-- ARGV[1]: number of turns.
-- Reply: 'unknown' if there is no session, 'turn' if it has fewer turns, 'incomplete' if its log
--   has, else {the fields turns, calls, recent and repairs; turn log; tokens; hash of tool calls; at
--   the last turn the repairs and the five hashes of episodes, else nothing}.
local found = redis.call('HMGET', KEYS[1], 'turns', 'calls', 'recent', 'repairs')
if not found[1] then return 'unknown' end
local turns, last = tonumber(ARGV[1]), tonumber(found[1])
if turns < 0 or turns > last then return 'turn' end
local log, tokens, latest = {}, {}, {}
if turns > 0 then
  log = redis.call('LRANGE', KEYS[3], 0, turns - 1)
  tokens = redis.call('LRANGE', KEYS[4], 0, turns - 1)
end
if #log ~= turns or #tokens ~= turns then return 'incomplete' end
if turns == last then
  latest = {redis.call('LRANGE', KEYS[6], 0, -1)}
  for index = 7, 11 do table.insert(latest, redis.call('HGETALL', KEYS[index])) end
end
return {found, log, tokens, redis.call('HGETALL', KEYS[5]), latest}
