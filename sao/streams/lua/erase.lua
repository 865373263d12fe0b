#!lua flags=allow-oom
-- Erase what the run holds of one trajectory, dead letters apart, and say what was there (sao.streams.base.Erased).
-- KEYS: trajectories, scored, payload, routed experts, seen bucket, unconsumed, waiting, since, answers, kept, ready,
--       joined
-- ARGV: group, trajectory id, seen time to live (ms), then the fields of the mark that tells the trainer
-- An entry that somebody holds goes too: the fence turns away whatever its holder does next. In its place the mark.
local group, id = ARGV[1], ARGV[2]

local entries = 0
for i = 1, 2 do
  for _, entry in ipairs(redis.call('XRANGE', KEYS[i], '-', '+')) do
    local fields, marked = entry[2], false
    for at = 1, #fields, 2 do marked = marked or fields[at] == 'forgotten' end
    if fields[2] == id and not marked then
      redis.pcall('XACK', KEYS[i], group, entry[1])
      redis.call('XDEL', KEYS[i], entry[1])
      entries = entries + 1
    end
  end
end

local waiting = redis.call('HDEL', KEYS[7], id)
redis.call('ZREM', KEYS[8], id)
local answers = redis.call('HDEL', KEYS[9], id)
redis.call('ZREM', KEYS[10], id)
redis.call('SREM', KEYS[11], id)
redis.call('ZREM', KEYS[12], id)
local payload = redis.call('DEL', KEYS[3])
local routed = redis.call('DEL', KEYS[4])

-- A worker that still has it in its spool is told that it is here already, and lets go of it.
redis.call('SADD', KEYS[5], id)
if redis.call('PTTL', KEYS[5]) < 0 then redis.call('PEXPIRE', KEYS[5], ARGV[3]) end
redis.call('SREM', KEYS[6], id)
if entries + waiting > 0 then redis.call('XADD', KEYS[2], '*', '_id', id, unpack(ARGV, 4)) end
return { payload, routed, entries, waiting, answers }
