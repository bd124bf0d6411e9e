-- Find sessions of a tenant that begin with the most of some pages. Needs page_runs.lua.
--
-- KEYS: the tree, as of extend_pages.lua.
-- ARGV[1]: the ids of the pages, joined. ARGV[2]: the most sessions.
-- Reply: how many of the pages are known, then sessions that have these.
local ids, most, known, last = ARGV[1], tonumber(ARGV[2]), 0, nil
while known < #ids do
  local run = redis.call('HGET', KEYS[3], string.sub(ids, known + 1, known + id_bytes))
  if not run then break end
  last = run
  local pages = redis.call('HGET', KEYS[2], run)
  local common = count_common(pages, string.sub(ids, known + 1))
  known = known + common
  if common < #pages then break end
end
local function read_behind(kind, run, limit)
  local prefix = kind .. run .. ':'
  local found = redis.call('ZRANGEBYLEX', KEYS[5], '[' .. prefix, '(' .. kind .. run .. ';', 'LIMIT', 0, limit)
  for index, member in ipairs(found) do found[index] = string.sub(member, #prefix + 1) end
  return found
end
local reply, runs, at = {known / id_bytes}, {last}, 1
while at <= #runs and #reply <= most do
  for _, session in ipairs(read_behind('s', runs[at], most + 1 - #reply)) do table.insert(reply, session) end
  -- A run with nothing behind it but runs has sessions behind each of them.
  for _, run in ipairs(read_behind('r', runs[at], most + 1 - #reply)) do table.insert(runs, run) end
  at = at + 1
end
return reply
