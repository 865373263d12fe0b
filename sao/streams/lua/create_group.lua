#!lua flags=allow-oom
-- Create the consumer group where it is missing; it begins with everything that is on the stream.
-- A script, because the bare command is refused at the memory bound even where the group exists: a consumer that
-- restarts then could never drain.    KEYS: stream    ARGV: group
local reply = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if reply.err and not string.find(reply.err, 'BUSYGROUP', 1, true) then return reply end
return 1
