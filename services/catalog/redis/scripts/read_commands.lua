-- Run several reading commands on one session at one time.
--
-- KEYS: the session's keys.
-- ARGV: commands: number of words, name, index of a key, the other words.
-- Reply: {1 if the session exists, else 0; the reply to each command}.
local at, replies = 1, {redis.call('EXISTS', KEYS[1])}
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  local key = KEYS[tonumber(ARGV[at + 2])]
  table.insert(replies, redis.call(ARGV[at + 1], key, unpack(ARGV, at + 3, at + words)))
  at = at + words + 1
end
return replies
