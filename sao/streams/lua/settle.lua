#!lua flags=allow-oom
-- Acknowledge and delete entries whose effect is durable, their payloads and their routed experts.
-- KEYS: stream, unconsumed, board, then the keys of payload and routed experts per delivery
-- ARGV: group, consumer, trainer epoch, then entry id, attempt, trajectory id per delivery
-- Returns the number that were still owned, or {newest epoch} when a newer trainer exists.
local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local newest = tonumber(redis.call('HGET', KEYS[3], 'epoch') or '0')
if tonumber(ARGV[3]) < newest then return { newest } end

local owned = 0
for i = 4, #KEYS, 2 do
  local at = 4 + (i - 4) / 2 * 3
  local entry, attempt, id = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if pending.err then
    if string.find(pending.err, 'NOGROUP', 1, true) then return owned end
    return pending
  end
  local row = pending[1]
  if row and row[2] == consumer and row[4] == attempt then
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
    redis.call('DEL', KEYS[i], KEYS[i + 1])
    redis.call('SREM', KEYS[2], id)
    owned = owned + 1
  end
end
return owned
