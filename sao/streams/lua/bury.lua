#!lua flags=allow-oom
-- Move one entry to the dead letters under the fence of move.lua, release its admission, and count it.
-- KEYS: from, dead, unconsumed, totals, payload, routed experts
-- ARGV: group, consumer, entry id, attempt, trajectory id, stream, reason, fields (JSON), counter, a letter's own bytes
-- Returns the bytes of all dead letters, or 0 when the delivery was lost.
local from, group, entry, id = KEYS[1], ARGV[1], ARGV[3], ARGV[5]
local stream, reason, fields, counter = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local pending = redis.pcall('XPENDING', from, group, entry, entry, 1)
if pending.err then
  if string.find(pending.err, 'NOGROUP', 1, true) then return 0 end
  return pending
end
local row = pending[1]
if not row or row[2] ~= ARGV[2] or row[4] ~= tonumber(ARGV[4]) then return 0 end

local stored = redis.call('STRLEN', KEYS[5]) + redis.call('STRLEN', KEYS[6])
local size = string.format('%d', tonumber(ARGV[10]) + stored + #reason + #fields)
redis.call('XACK', from, group, entry)
redis.call('XDEL', from, entry)
redis.call('XADD', KEYS[2], '*', '_id', id, 'stream', stream, 'attempt', ARGV[4], 'reason', reason, 'fields', fields,
  'size', size)
redis.call('SREM', KEYS[3], id)
redis.call('HINCRBY', KEYS[4], counter, 1)
return redis.call('HINCRBY', KEYS[4], 'bytes', size)
