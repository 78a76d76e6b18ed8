"""Requests for many workers: a queue in Redis from which each request is answered once, whoever dies meanwhile."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from .connection import Client, connect

PARTS = ("requests", "waiting", "claims", "leases", "results", "tries")
MOST_TRIES = 5  # workers that a request may outlive: one that kills whoever takes it must not kill them all

# Every script is one step: it happens as a whole or not at all, and once more does no harm.
LIBRARY = """
local requests, waiting, claims, leases, results, tries = unpack(KEYS)

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function living(worker)
  local lease = redis.call('ZSCORE', leases, worker)
  return lease and tonumber(lease) > now()
end

-- What dead workers had claimed goes back to the front, the oldest first.
local function take_back(most)
  local back = {}
  local all = redis.call('HGETALL', claims)
  for i = 1, #all, 2 do
    if not living(all[i + 1]) then back[#back + 1] = all[i] end
  end
  table.sort(back, function(a, b) return a > b end)
  for _, id in ipairs(back) do
    redis.call('HDEL', claims, id)
    if redis.call('HINCRBY', tries, id, 1) >= most then
      redis.call('HSETNX', results, id, '{"error": "every worker that took it died"}')
    else
      redis.call('LPUSH', waiting, id)
    end
  end
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now())
  return back
end
"""
SCRIPTS = {
    "put": """
local new = 0
for i = 1, #ARGV, 2 do
  if redis.call('HSETNX', requests, ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('RPUSH', waiting, ARGV[i])
    new = new + 1
  end
end
return new
""",
    "take": """
local worker, lease, most, want = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local held, taken = {}, {}
for i = 5, #ARGV do held[ARGV[i]] = true end
take_back(most)
redis.call('ZADD', leases, now() + lease, worker)
local all = redis.call('HGETALL', claims)
for i = 1, #all, 2 do -- claimed by a call whose answer was lost
  if all[i + 1] == worker and not held[all[i]] then taken[#taken + 1] = redis.call('HGET', requests, all[i]) end
end
while #taken < want do
  local id = redis.call('LPOP', waiting)
  if not id then break end
  redis.call('HSET', claims, id, worker)
  taken[#taken + 1] = redis.call('HGET', requests, id)
end
local kept = {}
for i = 5, #ARGV do
  if redis.call('HGET', claims, ARGV[i]) == worker then kept[#kept + 1] = ARGV[i] end
end
return {taken, kept}
""",
    "finish": """
local worker, id, result = unpack(ARGV)
if redis.call('HGET', claims, id) ~= worker then return 0 end
redis.call('HDEL', claims, id)
return redis.call('HSETNX', results, id, result)
""",
    "give_back": """
local given = 0 -- from the last to the first, so that they stand in front as they stood before
for i = #ARGV, 2, -1 do
  if redis.call('HGET', claims, ARGV[i]) == ARGV[1] then
    redis.call('HDEL', claims, ARGV[i])
    redis.call('LPUSH', waiting, ARGV[i])
    given = given + 1
  end
end
return given
""",
    "leave": """
redis.call('ZREM', leases, ARGV[1])
return take_back(math.huge)
""",
    "take_back": "return take_back(tonumber(ARGV[1]))",
}


@dataclass(frozen=True)
class TextRequest:
    """A prompt to continue, and how: all that decides about the text, so that every worker writes the same.

    Args: id: a name that no other request of the pool has; prompt: characters; tokens: how many to write; seed: of
        its own random stream; temperature, top_k, top_p: as in Sampling; temperature 0 takes the likeliest.
    """

    id: str
    prompt: str
    tokens: int = 100
    seed: int = 0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class Taken:
    """What a worker got from the queue."""

    new: list[TextRequest] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)  # ids of those that it held and may go on with


class RequestQueue(Client):
    """The requests of a pool, in Redis. A worker claims some under a lease; what it does not answer goes to others.

    A claim ends with its result, with `give_back`, or with the lease, and then exactly one other worker gets the
    request. A result that comes from a worker without the claim is refused, so each request has one.

    Args: url, pool, timeout: as in RedisBlockManager; worker: a name that no other process ever had;
        lease_seconds: how long a claim lasts after the last `take`.
    """

    _asks_for = "the requests of "

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        worker: str = "",
        lease_seconds: float = 10.0,
        timeout: float = 5.0,
    ):
        super().__init__(url, pool, timeout)
        self.worker, self.lease_seconds = worker, lease_seconds
        self._client, self._server = connect(url, timeout), url
        self._keys = [f"{{pagedkv:{pool}}}:v1:{part}" for part in PARTS]
        self._scripts = {name: self._client.register_script(LIBRARY + text) for name, text in SCRIPTS.items()}

    def put(self, requests: Iterable[TextRequest]) -> int:
        """Add requests at the end. Returns how many were new; an id that is known changes nothing."""
        pairs = [text for request in requests for text in (request.id, json.dumps(asdict(request)))]
        return self._run("put", *pairs) if pairs else 0

    def take(self, most: int = 1, held: Sequence[str] = ()) -> Taken:
        """Renew the lease, and claim up to `most` requests; those of dead workers first. Once more does no harm.

        Args: held: ids that this worker is at work on; those that are no longer its own are not in `kept`.
        """
        lease = int(self.lease_seconds * 1000)
        new, kept = self._run("take", self.worker, lease, MOST_TRIES, most, *held)
        return Taken([TextRequest(**json.loads(text)) for text in new], {id.decode() for id in kept})

    def finish(self, request_id: str, result: dict) -> bool:
        """Answer a request. False, and nothing changes, if it is not this worker's any more."""
        return bool(self._run("finish", self.worker, request_id, json.dumps(result)))

    def give_back(self, request_ids: Sequence[str]) -> int:
        """Let others have requests, before all that wait. Returns how many were this worker's."""
        return self._run("give_back", self.worker, *request_ids) if request_ids else 0

    def leave(self) -> None:
        """End the lease at once; what was claimed goes to others."""
        self._run("leave", self.worker)

    def take_back(self) -> list[str]:
        """Let what dead workers had claimed wait again, as `take` does first; the ids."""
        return [id.decode() for id in self._run("take_back", MOST_TRIES)]

    def results(self) -> dict[str, dict]:
        """All answers so far, by the request's id."""
        return {id.decode(): json.loads(text) for id, text in self._call("hgetall", self._keys[4]).items()}

    def claims(self) -> dict[str, str]:
        """Who is at work on what: request -> worker."""
        return {id.decode(): name.decode() for id, name in self._call("hgetall", self._keys[2]).items()}

    @property
    def waiting(self) -> int:
        """Requests that nobody has claimed."""
        return self._call("llen", self._keys[1])

    @property
    def done(self) -> bool:
        """Whether every request has its answer."""
        requests, results = (self._call("hlen", self._keys[i]) for i in (0, 4))
        return requests <= results

    def forget(self, others: Iterable[bytes] = ()) -> None:
        """Remove all requests and results, and other keys of the pool."""
        self._call("delete", *self._keys, *others)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _run(self, name: str, *arguments):
        return self._sent(lambda: self._scripts[name](self._keys, arguments, client=self._client))

    def _call(self, name: str, *arguments):
        return self._sent(lambda: getattr(self._client, name)(*arguments))

    def _reach(self, url: str) -> None:
        """Speak to this server from now on."""
        if url != self._server:
            self._client.close()
            self._client, self._server = connect(url, self.timeout), url
