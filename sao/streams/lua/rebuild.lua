#!lua flags=allow-oom
-- Write the dead letters anew: a deleted entry's text stays in its stream's memory, and in the server's files, until
-- every entry of its block is deleted.    KEYS: dead    Letters keep their entry ids; no group reads this stream.
local rows = redis.call('XRANGE', KEYS[1], '-', '+')
redis.call('DEL', KEYS[1])
for _, row in ipairs(rows) do redis.call('XADD', KEYS[1], row[1], unpack(row[2])) end
return #rows
