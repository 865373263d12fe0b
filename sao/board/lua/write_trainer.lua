#!lua flags=allow-oom
-- Store the trainer's facts unless a newer trainer epoch exists.
-- KEYS: board    ARGV: epoch, facts
-- Returns the newest epoch, which is above ARGV[1] when the write was refused.
local newest = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if tonumber(ARGV[1]) >= newest then redis.call('HSET', KEYS[1], 'trainer', ARGV[2]) end
return newest
