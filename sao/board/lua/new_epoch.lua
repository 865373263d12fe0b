#!lua flags=allow-oom
-- Claim the next trainer epoch.    KEYS: board
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
