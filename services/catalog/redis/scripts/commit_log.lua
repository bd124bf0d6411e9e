-- Shared by the scripts that commit. KEYS[2] is the list of the session's latest commits, each
-- entry '<commit id> <result>'. A commit whose reply was lost is sent again and finds its result
-- here.
local function find_result(id)
  for _, entry in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
    local known, result = string.match(entry, '^(%S+) (.*)$')
    if known == id then return result end
  end
end
