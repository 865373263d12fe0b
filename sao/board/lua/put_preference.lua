#!lua flags=allow-oom
-- Store a document as the next preference version and make it current.
-- KEYS: board, preferences    ARGV: request id, expected version or '', document
-- A request that is sent twice (its answer was lost) is carried out once.
-- Returns {stored version or 0 for a conflict, version that was current}.
local current = tonumber(redis.call('HGET', KEYS[1], 'preference') or '0')
if redis.call('HGET', KEYS[1], 'preference-request') == ARGV[1] then return { current, current - 1 } end
if ARGV[2] ~= '' and tonumber(ARGV[2]) ~= current then return { 0, current } end
local version = string.format('%d', current + 1)
redis.call('HSET', KEYS[2], version, ARGV[3])
redis.call('HSET', KEYS[1], 'preference', version, 'preference-request', ARGV[1])
return { current + 1, current }
