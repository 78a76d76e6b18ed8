"""Pages in Redis: how they travel between machines. One page is one value, so it is there whole or not at all."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from ..allocator import Observed, Observer
from .files import SaveFailed
from .record import FOREIGN, DamagedPage, Layout, Page, check_key

CHUNK_BYTES = (
    8 << 20
)  # at most so much in one message, so that nobody waits long behind it; one page at least


class RedisPageStore(Observed):
    """Pages in a Redis server, one value each: header, identity, checksum and contents (`Layout.pack`).

    A page is written once: who comes second with the same key changes nothing. One that is missing, cut, damaged, of
    another layout or under a wrong name is a miss, never wrong data; a damaged one is removed and counted in
    `corrupt`. Observers are told of every `fetch`: how many pages came, and how many were damaged.

    Args: url: of the server, or of any one of a Redis Cluster, as redis-py takes it; layout: what the pages
        look like, and whose they are; pool: pages of other pools are others; ttl: seconds until a page is
        forgotten as a whole, None: never; timeout: seconds that a call may wait for the server.
    Raises: ConnectionError, here and in every method, if the server cannot be used; it names the setting to look at.
    """

    def __init__(
        self,
        url: str,
        layout: Layout,
        *,
        pool: str = "default",
        ttl: float | None = None,
        timeout: float = 5.0,
        observers: Iterable[Observer] = (),
    ):
        super().__init__(observers)
        if ttl is not None and not 0.001 <= ttl < 2**53:
            raise ValueError(f"ttl must be at least 0.001 seconds, or None, got {ttl!r}")
        self.url, self.timeout, self.layout, self.corrupt = url, timeout, layout, 0
        self._prefix = (
            f"{{pagedkv:{pool}}}:v1:page:".encode()
        )  # one hash tag: one server of a cluster has all pages of a pool
        self._ttl = None if ttl is None else round(ttl * 1000)  # milliseconds
        self._chunk = max(1, CHUNK_BYTES // layout.record.itemsize)  # pages
        self._redis = _connect(url, timeout)
        with self._saying_what_failed():
            self._find_server()

    def __contains__(self, key: bytes) -> bool:
        with self._saying_what_failed():
            return bool(self._redis.exists(self._name(key)))

    def keys(self) -> list[bytes]:
        """The keys of all pages, damaged ones included."""
        found = []
        with self._saying_what_failed():
            pattern = _literally(self._prefix) + b"*"
            for name in self._redis.scan_iter(match=pattern, count=1000):
                with contextlib.suppress(ValueError):
                    found.append(bytes.fromhex(name[len(self._prefix) :].decode()))
        return found

    def put_many(self, records: Iterable[tuple[bytes, Page]]) -> int:
        """Store the pages that are not there yet.

        Args: records: key (32 bytes) and page (as `KVStorage.page` returns it).
        Returns: how many were new.
        Raises: SaveFailed if the server has no room or refuses, ValueError for a key or page that does not fit.
        """
        packed = ((self._name(key), self.layout.pack(key, page)) for key, page in records)
        new = 0
        while chunk := list(itertools.islice(packed, self._chunk)):
            with self._saying_what_failed(writing=True), self._redis.pipeline(transaction=False) as pipeline:
                for name, record in chunk:
                    pipeline.set(name, record, nx=True, px=self._ttl)
                new += sum(map(bool, pipeline.execute()))
        return new

    def get_many(self, digests: Iterable[bytes]) -> list[Page | None]:
        """Pages by their keys, one round trip for as many as fit a message; None for each that cannot be had."""
        started = self._clock()
        keys, pages, damaged = list(digests), [], []
        names = [self._name(key) for key in keys]
        for first in range(0, len(keys), self._chunk):
            with self._saying_what_failed():
                values = self._redis.mget(names[first : first + self._chunk])
            for key, value in zip(keys[first:], values, strict=False):
                try:
                    pages.append(None if value is None else self.layout.unpack(key, value))
                except DamagedPage:
                    pages.append(None)
                    if self.layout.fault(value, key) != FOREIGN:
                        damaged.append(key)
        self.corrupt += len(damaged)
        with self._saying_what_failed():
            for key in damaged:  # if somebody has just stored it anew, it is a miss once more
                self._redis.delete(self._name(key))
        fetched = sum(page is not None for page in pages)
        self._tell("fetch", started, pages=fetched, damaged=len(damaged))
        return pages

    def delete(self, digest: bytes) -> bool:
        """Forget a page; whether it was there."""
        with self._saying_what_failed(writing=True):
            return bool(self._redis.delete(self._name(digest)))

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _find_server(self) -> None:
        """Ask for something of the pool: in a cluster, a server that does not keep it says which one does."""
        from redis.exceptions import MovedError

        try:
            self._redis.exists(self._prefix)
        except MovedError as error:
            self._redis = _connect(at_node(self.url, error), self.timeout)

    def _name(self, key: bytes) -> bytes:
        check_key(key)
        return self._prefix + key.hex().encode()

    @contextlib.contextmanager
    def _saying_what_failed(self, writing: bool = False) -> Iterator[None]:
        """What goes wrong with the server, in words that name the setting."""
        from redis import exceptions

        where = f"the page store at {_without_password(self.url)}"
        try:
            yield
        except exceptions.AuthenticationError as error:
            raise ConnectionError(f"{where} refuses the password in url: {error}") from error
        except exceptions.NoPermissionError as error:
            raise ConnectionError(f"{where} does not allow this to the user in url: {error}") from error
        except exceptions.MovedError as error:
            self._redis = _connect(at_node(self.url, error), self.timeout)  # for the next call
            raise ConnectionError(f"{where}: another server of the cluster keeps its pages now") from error
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            self._redis = _connect(self.url, self.timeout)  # in a cluster, another one may have taken over
            raise ConnectionError(f"{where} does not answer (url, timeout): {error}") from error
        except exceptions.ResponseError as error:
            if "NOAUTH" in str(error).upper():
                raise ConnectionError(f"{where} wants a password in url: {error}") from error
            if writing:  # full, a replica, a disk that refuses
                raise SaveFailed(None, f"{where} refuses to store pages: {error}") from error
            raise ConnectionError(f"{where} refuses: {error}") from error


def _connect(url: str, timeout: float):
    try:
        from redis import Redis
    except ImportError:
        raise ImportError('a page store in Redis needs redis: pip install "pagedkv[redis]"') from None
    try:
        return Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"url must be that of a Redis server, like redis://127.0.0.1:6379/0, got {url!r}: {error}"
        ) from None


def at_node(url: str, moved) -> str:
    """The URL of the server to which one of a cluster sends us (redis-py's MovedError)."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host = moved.host or parts.hostname
    return parts._replace(netloc=f"{user}{at}{f'[{host}]' if ':' in host else host}:{moved.port}").geturl()


def _without_password(url: str) -> str:
    """A URL that may be shown."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _literally(name: bytes) -> bytes:
    """A pattern for SCAN that matches exactly this."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^-" else bytes([c]) for c in name)
