#!lua flags=allow-oom
-- Move one entry to another stream if this very delivery is still the newest one (the fence).
-- KEYS: from, to    ARGV: group, consumer, entry id, attempt, trajectory id, then field, value, ...
-- Allowed at the memory bound: draining is what makes room. Returns 1, or 0 when the delivery was lost.
local from, group, entry, id = KEYS[1], ARGV[1], ARGV[3], ARGV[5]
local pending = redis.pcall('XPENDING', from, group, entry, entry, 1)
if pending.err then
  if string.find(pending.err, 'NOGROUP', 1, true) then return 0 end
  return pending
end
local row = pending[1]
if not row or row[2] ~= ARGV[2] or row[4] ~= tonumber(ARGV[4]) then return 0 end

redis.call('XACK', from, group, entry)
redis.call('XDEL', from, entry)
redis.call('XADD', KEYS[2], '*', '_id', id, unpack(ARGV, 6))
return 1
