-- Shared by the scripts that change the tree of page ids (services/catalog/page_tree.py says what it is).
-- KEYS[1]: hash of the pages: id -> '<references> <id of the page before it, or nothing>'. KEYS[2]: sorted set of
-- dead pages by the time of their death. KEYS[3]: hash of what each session ends with: '<time of the last change> ',
-- and for each end the id of its page and a number of 16 digits, which follows from the order of the proposals. Its
-- field '' has the last number.
local now = redis.call('TIME')[1]

local function read_ends(session)
  local entry, ends = redis.call('HGET', KEYS[3], session) or '', {}
  for at = (string.find(entry, ' ', 1, true) or 0) + 1, #entry, 32 do
    ends[#ends + 1] = {string.sub(entry, at, at + 15), tonumber(string.sub(entry, at + 16, at + 31))}
  end
  return ends
end

local function write_ends(session, ends)
  redis.call('HDEL', KEYS[3], session)  -- first, as it needs no memory
  local entry = now .. ' '
  for _, each in ipairs(ends) do entry = entry .. each[1] .. string.format('%016d', each[2]) end
  if #ends > 0 then redis.call('HSET', KEYS[3], session, entry) end
end

local function read_page(page)
  local value = redis.call('HGET', KEYS[1], page)
  local space = string.find(value, ' ', 1, true)
  return tonumber(string.sub(value, 1, space)), string.sub(value, space + 1)
end

local function write_page(page, refs, before)
  redis.call('HSET', KEYS[1], page, string.format('%d ', refs) .. before)
end

-- Add a session with these pages: ids, joined.
local function hold_pages(ids)
  local function get_page(number) return string.sub(ids, 16 * number - 15, 16 * number) end
  -- Where a page is known all before it are.
  local known, most = 0, #ids / 16
  while known < most do
    local middle = math.ceil((known + most) / 2)
    if redis.call('HEXISTS', KEYS[1], get_page(middle)) == 1 then known = middle else most = middle - 1 end
  end
  if known > 0 then
    local refs, before = read_page(get_page(known))
    write_page(get_page(known), refs + 1, before)
  end
  for number = known + 1, #ids / 16 do
    write_page(get_page(number), 1, get_page(number - 1))
    redis.call('ZREM', KEYS[2], get_page(number))
  end
end

-- Forget a session that ended with a page; pages that no session has are dead.
local function drop_end(page)
  while page ~= '' do
    local refs, before = read_page(page)
    if refs > 1 then return write_page(page, refs - 1, before) end
    redis.call('HDEL', KEYS[1], page)
    redis.call('ZADD', KEYS[2], now, page)
    page = before
  end
end
