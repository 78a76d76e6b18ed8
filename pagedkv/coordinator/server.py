"""A Redis server inside this process, for lessons and tests on machines without one."""

import atexit
import functools
import os
import threading


def embedded_server() -> str:
    """Start a fakeredis server on a free loopback port; it ends with the process.

    Returns: its URL, redis://127.0.0.1:PORT.
    Raises: ImportError without the extra `redis`.
    """
    try:
        import lupa  # noqa: F401  the Lua that runs the scripts
        from fakeredis import TcpFakeServer
    except ImportError:
        raise ImportError(
            'a server inside the process needs fakeredis: pip install "pagedkv[redis]"'
        ) from None
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis", server_version=(7, 0))
    server.daemon_threads = True  # a client that is still connected must not keep the process alive
    threading.Thread(target=server.serve_forever, daemon=True, name="embedded Redis").start()
    atexit.register(server.shutdown)
    host, port = server.server_address
    return f"redis://{host}:{port}"


def default_url() -> str:
    """$REDIS_URL, or else one server for the whole process."""
    return os.environ.get("REDIS_URL") or _embedded()


_embedded = functools.cache(embedded_server)
