#!lua flags=allow-oom
-- KEYS: cursor, frontier, lease-expiry    ARGV: now (ms)
-- Returns {live, expired, next slot, frontier slot}.
local live = redis.call('ZCOUNT', KEYS[3], '(' .. ARGV[1], '+inf')
local frontier = tonumber(redis.call('GET', KEYS[2]) or '0')
local cursor = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), frontier)
return { live, redis.call('ZCARD', KEYS[3]) - live, cursor, frontier }
