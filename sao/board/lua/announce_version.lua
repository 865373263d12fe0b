#!lua flags=allow-oom
-- Store a version's record under its name, once, unless a newer trainer epoch exists.
-- KEYS: board, versions    ARGV: epoch, name, record
-- Returns {newest epoch, the record now stored or nothing}.
local newest = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if tonumber(ARGV[1]) < newest then return { newest } end
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
return { newest, redis.call('HGET', KEYS[2], ARGV[2]) }
