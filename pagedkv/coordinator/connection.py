"""One connection to the server that holds a pool, and the scripts that run there."""

import functools
import hashlib
import re
import threading
import time
from collections.abc import Callable
from importlib import resources
from urllib.parse import urlsplit

from ..store.redis import at_node
from .errors import CoordinatorError, Unreachable

VERSION = "v1"  # of the keys and of what they hold
PARTS = "pool workers seqs tables owners plain cached sealed holders copying parcels"
FIRST_PAUSE = 0.01  # seconds before a cut connection is tried again; doubles


@functools.cache
def script(name: str) -> tuple[bytes, bytes]:
    """The text of a script, before it the functions of the library that it needs, and the SHA-1 of all.

    The server makes those functions anew for every call, so each of them costs time: the usual step of decoding has
    its own text in front of extend.lua, and ends before the rest of the library.
    """
    folder = resources.files(__package__) / "scripts"
    library = re.split(r"(?m)^(?=local )", (folder / "library.lua").read_text("utf-8"))
    code = ""
    for file in ("step", name) if name == "extend" else (name,):
        text = (folder / f"{file}.lua").read_text("utf-8")
        for part in reversed(library):
            if part not in code and any(re.search(rf"\b{defined}\b", text) for defined in _defined(part)):
                text = part + text
        code += text
    return code.encode(), hashlib.sha1(code.encode()).hexdigest().encode()


def _defined(part: str) -> list[str]:
    """The names that a part of the library is there for; without any it is a comment."""
    head = re.match(r"local (?:function )?([\w, ]+)", part)
    return head[1].replace(" ", "").split(",") if head else []


def keys_of(pool: str) -> list[bytes]:
    """All keys of a pool. They share one hash tag, so a Redis Cluster keeps them on one server."""
    return [f"{{pagedkv:{pool}}}:{VERSION}:{name}".encode() for name in PARTS.split()]


def connect(url: str, timeout: float):
    """A client of redis-py that tries once: whether to send again is for those to say who number their requests.

    Raises: ImportError without the extra `redis`, ValueError for a URL that is none.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ImportError('a shared pool needs redis-py: pip install "pagedkv[redis]"') from None
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except (ValueError, AttributeError) as error:
        raise ValueError(f"url must be redis://HOST:PORT or the like, got {url!r}: {error}") from None


def cluster_changes() -> tuple:
    """The errors of a Redis Cluster that pass: the slot of a pool moves, or its server is being replaced."""
    from redis import exceptions

    return exceptions.AskError, exceptions.TryAgainError, exceptions.ClusterDownError


def shown(url: str) -> str:
    """A URL without its password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class Client:
    """Whoever asks the server of a pool: sends once more what was not answered, and follows a pool that moves.

    Args: url, pool, timeout: as in RedisBlockManager; retried: called when a request is sent once more.
    """

    _asks_for = ""  # what of the pool, for errors

    def __init__(self, url: str, pool: str, timeout: float, retried: Callable[[], None] = lambda: None):
        self.url, self.pool, self.timeout, self._retried = url, pool, timeout, retried

    def _reach(self, url: str) -> None:
        """Speak to this server from now on."""
        raise NotImplementedError

    def _sent(self, call: Callable):
        """What the server answers. A call whose answer was lost is made again until `timeout` is over."""
        import redis

        deadline, pause = time.monotonic() + self.timeout, FIRST_PAUSE
        while True:
            try:
                return call()
            except redis.AuthenticationError as error:
                raise CoordinatorError(f"{self._where} refuses the password in url: {error}") from None
            except redis.exceptions.MovedError as error:  # a cluster keeps the pool elsewhere: all of it
                if time.monotonic() > deadline:
                    raise self._unreachable(error) from None
                self._reach(at_node(self.url, error))
            except (redis.ConnectionError, redis.TimeoutError, OSError, *cluster_changes()) as error:
                if time.monotonic() + pause > deadline:
                    raise self._unreachable(error) from None
                self._reach(self.url)  # it knows who has taken over
                time.sleep(pause)
                pause *= 2
                self._retried()
            except redis.ResponseError as error:
                raise self._said(error) from None

    @property
    def _where(self) -> str:
        return f"{self._asks_for}pool {self.pool!r} at {shown(self.url)}:"

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self._where} did not answer within timeout = {self.timeout:g} s (is url right?): {error}"
        )

    def _said(self, error: Exception) -> CoordinatorError:
        """What the server complains of, and the setting that it is about."""
        text = f"{type(error).__name__}: {error}"
        hints = {
            "WRONGTYPE": f"pool = {self.pool!r}: its keys hold something else already",
            "ReadOnly|READONLY|read only": "url must name the primary, this server is a read-only replica",
            "NOAUTH|WRONGPASS|unauthenticated": "it refuses the password in url",
            "NoPermission|NOPERM": "the user in url may not do this",
            "SELECT is not allowed": "url must name database 0, a cluster has no other",
            "OutOfMemory|OOM": "its maxmemory is used up",
        }
        hint = next((hint for said, hint in hints.items() if re.search(said, text)), "it refuses a script")
        return CoordinatorError(f"{self._where} {hint} ({text})")


class Scripts(Client):
    """Runs the pool's scripts: each call is one round trip, and one whole change or none.

    Args: as in Client.
    """

    def __init__(self, url: str, pool: str, timeout: float, retried: Callable[[], None] = lambda: None):
        super().__init__(url, pool, timeout, retried)
        self._keys = keys_of(pool)
        self._packed_keys = _packed([b"%d" % len(self._keys), *self._keys])
        self._lock = threading.Lock()  # a heartbeat may come from another thread
        self._connection = self._server = None
        self._reach(url)

    def run(self, name: str, *arguments) -> list[bytes]:
        """Run a script, which bears being sent again. What it replies: a status, then sections."""
        return self._sent(lambda: sections_of(self._run(name, arguments)))

    def close(self) -> None:
        self._connection.disconnect()

    def _run(self, name: str, arguments: tuple) -> bytes:
        import redis

        text, sha = script(name)
        with self._lock:
            try:
                return self._command(b"EVALSHA", sha, arguments)
            except redis.exceptions.NoScriptError:
                return self._command(b"EVAL", text, arguments)

    def _command(self, command: bytes, what: bytes, arguments: tuple) -> bytes:
        """Send a command and wait for its reply. Packing it here saves half of the time that redis-py takes."""
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in arguments]
        count = 3 + len(self._keys) + len(parts)
        packed = b"*%d\r\n%b%b%b" % (count, _packed([command, what]), self._packed_keys, _packed(parts))
        try:
            self._connection.send_packed_command([packed])
            return self._connection.read_response()
        except KeyboardInterrupt:  # the reply may still come: nobody must take it for the next one's
            self._connection.disconnect()
            raise

    def _reach(self, url: str) -> None:
        """Speak to this server from now on."""
        with self._lock:
            if url != self._server:
                if self._connection is not None:
                    self._connection.disconnect()
                self._connection = connect(url, self.timeout).connection_pool.make_connection()
                self._server = url


def _packed(parts: list[bytes]) -> bytes:
    """Parts of a command as Redis reads them."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def sections_of(reply: bytes) -> list[bytes]:
    found, place = [], 0
    while place < len(reply):
        end = place + 4 + int.from_bytes(reply[place : place + 4], "little")
        found.append(reply[place + 4 : end])
        place = end
    return found
