#!lua flags=allow-oom
-- Make one change of the preferences, and its record, in one step; or say why not.
-- KEYS: board, preferences, changes, schedule, requests
-- ARGV: request id, what is asked (JSON: what, above, most, followed, min_seconds, if_version, switch, body)
-- `above`: the newest record that the caller knows of; a board with less has lost some, and changes nothing.
-- A request that is sent twice (its answer was lost) is carried out once, also when others came between.
-- Returns {verdict, text}: done + record (after the records above `above`, when those are at most `followed`), nothing, behind + newest record here, conflict + current version, held + the
-- record of the hold, limited + seconds to wait, full, unknown.
local board, preferences, changes, schedule, requests = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local REMEMBERED = 256
local ask = cjson.decode(ARGV[2])
local seq = tonumber(redis.call('HGET', board, 'preference-seq') or '0')
local made = redis.call('ZSCORE', requests, ARGV[1])
if made then return { 'done', redis.call('HGET', changes, made) } end
if seq < ask.above then return { 'behind', tostring(seq) } end

local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
local current = tonumber(redis.call('HGET', board, 'preference') or '0')
local hold = redis.call('HGET', board, 'preference-hold')

local function record(what, members, body)
  local line = string.format('{"seq":%d,"when_s":%s,"what":"%s",%s%s', seq + 1, now, what, members, string.sub(body, 2))
  local number = string.format('%d', seq + 1)
  redis.call('HSET', changes, number, line)
  redis.call('HSET', board, 'preference-seq', number)
  redis.call('ZADD', requests, number, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', requests, '-inf', seq + 1 - REMEMBERED)
  local answer = { 'done' }
  if seq - ask.above <= ask.followed then
    for before = ask.above + 1, seq do
      answer[#answer + 1] = redis.call('HGET', changes, string.format('%d', before)) or nil
    end
  end
  answer[#answer + 1] = line
  return answer
end

local function store(what, members, body)
  local version = string.format('%d', current + 1)
  local answer = record(what, string.format('"version":%s,%s', version, members), body)
  redis.call('HSET', preferences, version, answer[#answer])
  redis.call('HSET', board, 'preference', version)
  if what ~= 'initial' then redis.call('HSET', board, 'preference-stored', now) end
  return answer
end

local function wait_s()
  return tonumber(redis.call('HGET', board, 'preference-stored') or '0') + ask.min_seconds - tonumber(now)
end

local function earliest_due()
  local trainer = redis.call('HGET', board, 'trainer')
  local update = trainer and cjson.decode(trainer).update or -1
  local found = nil
  local entries = redis.call('HGETALL', schedule)
  for i = 1, #entries, 2 do
    local line, body = string.match(entries[i + 1], '^([^\n]*)\n(.*)$')
    local one = cjson.decode(line)
    local due = one.at_update and one.at_update <= update or one.at_s and one.at_s <= tonumber(now)
    -- Updates before times, each in their order: the one that was meant last is the one that stays.
    local rank = { one.at_update and 0 or 1, one.at_update or one.at_s, one.seq }
    local before = not found
    for place = 1, 3 do
      if found and rank[place] ~= found.rank[place] then
        before = rank[place] < found.rank[place]
        break
      end
    end
    if due and before then found = { id = entries[i], body = body, rank = rank, if_version = one.if_version } end
  end
  return found
end

if ask.what == 'apply' then
  if hold or redis.call('HLEN', schedule) == 0 then return { 'nothing', '' } end
  local due = earliest_due()
  if not due then return { 'nothing', '' } end
  local members = string.format('"switch":%s,', due.id)
  if due.if_version and due.if_version ~= current then
    redis.call('HDEL', schedule, due.id)
    local why = string.format('version %d is current, it was to follow version %d', current, due.if_version)
    return record('refuse', string.format('%s"detail":"%s",', members, why), due.body)
  end
  if wait_s() > 0 then return { 'nothing', '' } end
  redis.call('HDEL', schedule, due.id)
  return store('apply', members, due.body)
end
if ask.what == 'cancel' then
  local id = string.format('%d', ask.switch)
  if redis.call('HDEL', schedule, id) == 0 then return { 'unknown', '' } end
  return record('cancel', string.format('"switch":%s,', id), ask.body)
end
if ask.what == 'hold' then
  local answer = record('hold', '', ask.body)
  redis.call('HSET', board, 'preference-hold', answer[#answer])
  return answer
end
if ask.what == 'resume' then
  if not hold then return { 'nothing', '' } end
  redis.call('HDEL', board, 'preference-hold')
  return record('resume', '', ask.body)
end
if hold then return { 'held', hold } end
if ask.if_version and ask.if_version ~= current then return { 'conflict', tostring(current) } end
if ask.what == 'schedule' then
  if redis.call('HLEN', schedule) >= ask.most then return { 'full', '' } end
  local answer = record('schedule', '', ask.body)
  redis.call('HSET', schedule, string.format('%d', seq + 1), answer[#answer] .. '\n' .. ask.body)
  return answer
end
if wait_s() > 0 then return { 'limited', tostring(wait_s()) } end
return store(ask.what, '', ask.body)
