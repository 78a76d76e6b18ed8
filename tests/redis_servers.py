"""Redis servers for tests: a real one with a folder and a port of its own, or fakeredis inside this process."""

import contextlib
import secrets
import shutil
import socket
import subprocess
import time

import pytest
from needs import STRESS, need_module, need_program

# For tests that take seconds: one kind of server is enough for a normal run, `make stress` has them against both.
REAL = shutil.which("redis-server") is not None
KINDS = ["fake", "real"] if STRESS else ["real" if REAL else "fake"]


def free_port(port=0):
    """This port, or any; OSError if it is taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return probe.getsockname()[1]


def free_cluster_port():
    """A port that leaves room for the bus of a cluster, 10000 above."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError):
            free_port(port + 10000)
            return port


def started(folder, *options, port=None):
    """A redis-server process that answers, and its port."""
    program, port = need_program("redis-server"), port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        program,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        "--save",
        "",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"PING\r\n")
            if connection.recv(5) in (b"+PONG", b"-NOAU", b"-LOAD"):
                return process, port
        time.sleep(0.02)
    process.kill()
    raise RuntimeError(f"redis-server did not start on port {port}")


@contextlib.contextmanager
def real_server(folder, *options):
    """The URL of a redis-server that ends with the block."""
    need_module("redis", "redis")
    process, port = started(folder, *options)
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def fake_server():
    """The URL of fakeredis in this process."""
    need_module("redis", "redis")
    need_module("fakeredis", "redis")
    need_module("lupa", "redis")
    from pagedkv.coordinator import embedded_server

    return embedded_server()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The URL of a server by its kind, "fake" or "real", started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        urls = {}

        def url(kind):
            if kind not in urls:
                make = fake_server if kind == "fake" else lambda: stack.enter_context(real_server(folder))
                urls[kind] = make()
            return urls[kind]

        folder = tmp_path_factory.mktemp("redis")
        yield url


def new_pool():
    """A name that no other pool has."""
    return f"test-{secrets.token_hex(6)}"


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)
