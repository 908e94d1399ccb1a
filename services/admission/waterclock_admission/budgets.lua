-- One batch of budget questions, answered at once; the rule is that of allowances.py, to the unit.
--
-- KEYS   for each tenant of the batch: its level, its open submissions (a sorted set: member → ms)
-- ARGV   1: now in µs, or 0 for this server's clock
--        2: JSON {tenants: [[requests, tokens, concurrency]...],       limits a minute; 0 is none
--                 asks: [[tenant, member, tokens, expires_ms, repeats]...],  indices from 1; 0 is none
--                 releases: [[tenant, member]...]}
--        3: what is said to whoever is refused for concurrency, in ms
-- Answer code and retry_ms of each ask, then requests, tokens and at_us of each tenant: integers with
--        spaces between, in one string, because a client reads one string faster than many numbers.
-- Codes  0 granted, 1 requests_per_minute, 2 tokens_per_minute, 3 concurrency, 4 repeated
--
-- All numbers are integers below 2^53, which is as far as the numbers here are exact.

local UNITS = 60000000
local KEEP_MS = 93600000

local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call("TIME")
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local call = cjson.decode(ARGV[2])
local concurrency_ms = tonumber(ARGV[3])

local function text(number)
  return string.format("%.0f", number)
end

for _, release in ipairs(call.releases) do
  redis.call("ZREM", KEYS[2 * release[1]], release[2])
end

local states = {}
for i, tenant in ipairs(call.tenants) do
  local state = {
    requests_rate = tenant[1], tokens_rate = tenant[2], concurrency = tenant[3],
    requests = tenant[1] * UNITS, tokens = tenant[2] * UNITS, at = now, granted = false,
  }
  local found = redis.call("GET", KEYS[2 * i - 1])
  if found then
    local requests, tokens, at = string.match(found, "^(%d+) (%d+) (%d+)$")
    requests, tokens, at = tonumber(requests), tonumber(tokens), tonumber(at)
    local elapsed = math.min(math.max(0, now - at), UNITS)
    state.requests = math.min(state.requests, requests + elapsed * state.requests_rate)
    state.tokens = math.min(state.tokens, tokens + elapsed * state.tokens_rate)
    state.at = math.max(at, now)
  end
  redis.call("ZREMRANGEBYSCORE", KEYS[2 * i], "-inf", text(math.floor(now / 1000)))
  state.open = redis.call("ZCARD", KEYS[2 * i])
  states[i] = state
end

local answers = {}
local granted = {}
for i, ask in ipairs(call.asks) do
  local state = states[ask[1]]
  local open_key = KEYS[2 * ask[1]]
  local cost = ask[3] * UNITS
  local code, retry_ms = 0, 0
  if ask[5] > 0 and granted[ask[5]] then
    code = 4
  elseif redis.call("ZSCORE", open_key, ask[2]) then
    code = 0
  elseif state.concurrency > 0 and state.open >= state.concurrency then
    code, retry_ms = 3, concurrency_ms
  elseif state.requests_rate > 0 and state.requests < UNITS then
    code, retry_ms = 1, math.ceil((UNITS - state.requests) / (state.requests_rate * 1000))
  elseif state.tokens_rate > 0 and state.tokens < cost then
    code, retry_ms = 2, math.ceil((cost - state.tokens) / (state.tokens_rate * 1000))
  else
    if state.requests_rate > 0 then state.requests = state.requests - UNITS end
    if state.tokens_rate > 0 then state.tokens = state.tokens - cost end
    redis.call("ZADD", open_key, text(ask[4]), ask[2])
    state.open = state.open + 1
    state.granted = true
  end
  granted[i] = code == 0
  answers[2 * i - 1] = text(code)
  answers[2 * i] = text(retry_ms)
end

for i, state in ipairs(states) do
  redis.call("SET", KEYS[2 * i - 1],
    text(state.requests) .. " " .. text(state.tokens) .. " " .. text(state.at), "PX", KEEP_MS)
  if state.granted then redis.call("PEXPIRE", KEYS[2 * i], KEEP_MS) end
  answers[#answers + 1] = text(state.requests)
  answers[#answers + 1] = text(state.tokens)
  answers[#answers + 1] = text(state.at)
end
return table.concat(answers, " ")
