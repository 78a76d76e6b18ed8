"""`pagedkv worker`: what it needs, how it ends, and what it says when it cannot work."""

import os
import signal
import subprocess
import sys

import pytest
from needs import need_module
from redis_servers import free_port, new_pool, real_server

from pagedkv import cli
from pagedkv.coordinator import shared_memory
from pagedkv.coordinator.requests import RequestQueue, TextRequest
from pagedkv.coordinator.worker import text_alone
from pagedkv.lm import Llama

need_module("redis", "redis")

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | {
    "PYTHONUTF8": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def worker(*arguments, **environment):
    command = [sys.executable, "-m", "pagedkv.cli", "worker", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | environment)


def test_a_worker_answers_what_is_there_ends_when_told_and_leaves_nothing(tmp_path):
    model, pool = Llama.load(), new_pool()
    requests = [TextRequest(f"r{i}", "ROMEO: what light", 12, seed=i) for i in range(3)]
    with real_server(tmp_path) as url:
        queue = RequestQueue(url, pool)
        queue.put(requests)
        one = worker("--pool", pool, "--until-done", "--store-pages", REDIS_URL=url)
        assert one.communicate(timeout=120)[1] == "" and one.returncode == 0
        assert {k: v["text"] for k, v in queue.results().items()} == {
            r.id: text_alone(model, r) for r in requests
        }
        assert any(b":page:" in key for key in queue._client.scan_iter())
        two = worker("--redis", url, "--pool", pool)
        queue.put([TextRequest("late", "JULIET", 5)])
        while "late" not in queue.results():
            assert two.poll() is None
        two.send_signal(signal.SIGTERM)
        assert two.communicate(timeout=60)[1] == "" and two.returncode == 0
        assert queue.claims() == {}
        queue.close()
    assert not [found for found in shared_memory.segments() if (found.pool or "").startswith(pool)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "which server? say --redis URL or set REDIS_URL"),
        (["--redis", "here"], 2, "url must be"),
        (["--redis", f"redis://:hush@127.0.0.1:{free_port()}"], 1, "is url right?"),
    ],
)
def test_without_a_server_it_says_which_setting_to_look_at(arguments, code, message, capsys, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert cli.main(["worker", *arguments]) == code
    finally:
        for kind, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(kind, handler)
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and "hush" not in err


def test_clean_removes_what_nobody_has_open(capsys):
    pool = new_pool()
    path = shared_memory.FOLDER / shared_memory.segment_name(pool)
    if not path.parent.is_dir():
        pytest.skip("segments can be listed on Linux only")
    path.write_bytes(bytes(1 << 20))
    assert cli.main(["worker", "--clean"]) == 0
    assert not path.exists() and f"removed {path.name}, 1.0 MiB" in capsys.readouterr().out
