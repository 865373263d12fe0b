#!lua flags=allow-oom
-- Store one engine's facts.    KEYS: engines    ARGV: engine id, facts
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
