#!lua flags=no-writes
-- The current preference in one round trip.
-- KEYS: board, preferences    Returns {version, text}, or nothing when there is none.
local version = redis.call('HGET', KEYS[1], 'preference')
local text = version and redis.call('HGET', KEYS[2], version)
return text and { version, text } or {}
