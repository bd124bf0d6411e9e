-- Let a session not have the pages of some proposals any more. Needs page_tree.lua.
--
-- KEYS: the tree.
-- ARGV[1]: the session. ARGV[2], ARGV[3]: the first and the last number of the proposals.
-- Reply: how many of them there were.
local kept, dropped = {}, {}
for _, each in ipairs(read_ends(ARGV[1])) do
  local number = each[2]
  if number < tonumber(ARGV[2]) or number > tonumber(ARGV[3]) then
    kept[#kept + 1] = each
  else
    dropped[#dropped + 1] = each
  end
end
if #dropped > 0 then write_ends(ARGV[1], kept) end
for _, each in ipairs(dropped) do drop_end(each[1]) end
return #dropped
