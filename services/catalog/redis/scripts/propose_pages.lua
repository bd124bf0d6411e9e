-- Let a session have these pages beside those that it has: it may be committed with them. Needs page_tree.lua.
--
-- KEYS: the tree.
-- ARGV[1]: the session. ARGV[2]: the ids of the pages, joined.
-- Reply: the number of the proposal, 0 if it changes nothing.
local ends, last = read_ends(ARGV[1]), string.sub(ARGV[2], -16)
if #ends < 2 and (ends[1] or {''})[1] == last then return 0 end
local number = redis.call('HINCRBY', KEYS[3], '', 1)
if last ~= '' then
  hold_pages(ARGV[2])
  ends[#ends + 1] = {last, number}
  write_ends(ARGV[1], ends)
end
return number
