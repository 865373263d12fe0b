#!lua flags=allow-oom
-- Deliver again what this consumer holds unsettled after an entry id, oldest first.
-- KEYS: stream    ARGV: group, consumer, after, count, then entry ids to leave alone
-- Returns { {entry id, {field, value, ...}, attempt}, ... }
local stream, group, consumer, after, count = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local skip = {}
for i = 5, #ARGV do skip[ARGV[i]] = true end

local found = {}
while #found < count do
  local pending = redis.call('XPENDING', stream, group, '(' .. after, '+', 100, consumer)
  if #pending == 0 then break end
  for _, row in ipairs(pending) do
    after = row[1]
    if not skip[row[1]] then
      local claimed = redis.call('XCLAIM', stream, group, consumer, 0, row[1])
      if #claimed == 1 then found[#found + 1] = { row[1], claimed[1][2], row[4] + 1 } end
      if #found == count then break end
    end
  end
end
return found
