#!lua flags=allow-oom
-- Move one entry to the waiting room under the fence of move.lua, and release its admission.
-- KEYS: from, waiting, since, unconsumed, answers, ready, expired, kept, joined
-- ARGV: group, consumer, entry id, attempt, trajectory id, now (ms), fields (JSON)
-- Allowed at the memory bound: it takes no more than it gives up. Returns 1, or 0 when the delivery was lost.
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
redis.call('HSET', KEYS[2], id, ARGV[7])
redis.call('ZADD', KEYS[3], ARGV[6], id)
redis.call('SREM', KEYS[4], id)
redis.call('ZREM', KEYS[7], id)
if redis.call('HEXISTS', KEYS[5], id) == 1 then
  redis.call('SADD', KEYS[6], id)
  -- An answer that was joined once is to be joined again: it must not be forgotten as one that is over.
  if redis.call('ZREM', KEYS[9], id) == 1 then redis.call('ZADD', KEYS[8], ARGV[6], id) end
end
return 1
