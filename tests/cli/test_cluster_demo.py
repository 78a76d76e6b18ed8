"""The cluster as its users meet it: real processes over one pool, one of them killed, and who owns what."""

import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from needs import STRESS, need_module
from redis_servers import real_server

from pagedkv import cli
from pagedkv.cli import cluster_demo
from pagedkv.coordinator import embedded_server, shared_memory
from pagedkv.coordinator.worker import text_alone
from pagedkv.lm import Llama

need_module("redis", "redis")
need_module("fakeredis", "redis")
need_module("lupa", "redis")

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | {
    "PYTHONUTF8": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
SMALL = ("--requests", "6", "--tokens", "30", "--num-blocks", "64", "--lease", "3")


def demo(*arguments):
    command = [sys.executable, "-m", "pagedkv.cli", "cluster-demo", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=ENVIRONMENT, timeout=300
    )


def left_over():
    return [found for found in shared_memory.segments() if (found.pool or "").startswith("demo-")]


def test_one_is_killed_and_the_others_finish_with_the_same_texts():
    done = demo(*SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    killed = re.search(
        r"^(worker-\d) is killed \(signal 9, pid \d+\) with (r\d(?: r\d)*) on \d+ blocks", done.stdout, re.M
    )
    assert f"what {killed[1]} held is free or with others again" in done.stdout
    writers = dict(re.findall(r"^(r\d)  (\S+)", done.stdout, re.M))
    assert len(writers) == 6
    assert all(writers[request] != killed[1] for request in killed[2].split())
    assert "6 texts, each as one process alone writes it" in done.stdout
    assert not left_over()


def test_a_real_server_a_pool_that_is_tight_and_nobody_killed(tmp_path):
    redis = need_module("redis", "redis")
    with real_server(tmp_path, "--requirepass", "hush") as url:
        url = url.replace("//", "//:hush@")
        done = demo(
            "--redis", url, "--workers", 2, "--kill", 0, "--requests", 5, "--tokens", 24, "--num-blocks", 14
        )
        assert done.returncode == 0, done.stderr
        assert "5 texts, each as one process alone writes it" in done.stdout
        assert "is killed" not in done.stdout
        assert redis.Redis.from_url(url).keys() == []  # nothing is left in the server
    assert not left_over()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2", "--kill", "2"], "leaves nobody"),
        (["--tokens", "9999"], "beyond the model's 512"),
        (["--redis", "http://x"], "url must be"),
        (["--workers", "0"], "a whole number of at least 1"),
        (["--lease", "0"], "seconds of at least 0.1"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments, message, capsys):
    try:
        code = cli.main(["cluster-demo", *arguments])
    except SystemExit as ending:
        code = ending.code
    err = capsys.readouterr().err
    assert code == 2 and message in err and err.count("\n") == 1


def test_when_all_workers_fail_it_says_why(monkeypatch, capsys):
    monkeypatch.setattr(cluster_demo.sys, "executable", "/bin/false")
    assert cli.main(["cluster-demo", "--workers", "2"]) == 1
    assert "no worker is left" in capsys.readouterr().err
    assert not left_over()


class Terminal(io.StringIO):
    def isatty(self):
        return True


ROW = cluster_demo.Row("worker-1", 7, "1.0 s", ["r1", "r2"], 20, 3, 1)


def test_on_a_terminal_the_table_is_drawn_over_itself(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    file = Terminal()
    screen = cluster_demo.Screen(file)
    for _ in range(2):
        screen.show([ROW], "0 of 2 texts; 3 blocks")
    screen.say("killed")
    first, second, third = file.getvalue().split("\x1b[3A\x1b[J")
    assert first == second and len(first.splitlines()) == 3
    assert first.splitlines()[1].split() == ["worker-1", "7", "1.0", "s", "20", "3", "1", "r1", "r2"]
    assert third == "killed\n"


def test_a_narrow_terminal_gets_short_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    file = Terminal()
    cluster_demo.Screen(file).show([ROW], "0 of 2 texts; 3 blocks")
    assert max(map(len, file.getvalue().splitlines())) == 39


def test_elsewhere_a_line_is_said_when_something_has_changed():
    screen = cluster_demo.Screen(file := io.StringIO())
    for summary in ("0 of 2 texts; 3 blocks", "0 of 2 texts; 4 blocks", "1 of 2 texts; 4 blocks"):
        screen.show([ROW], summary)
    assert (
        file.getvalue() == "0 of 2 texts; 3 blocks: worker-1 r1 r2\n1 of 2 texts; 4 blocks: worker-1 r1 r2\n"
    )


@pytest.mark.skipif(not STRESS, reason="kills at twenty random moments take minutes: PAGEDKV_STRESS=1")
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_in_any_phase_loses_and_doubles_nothing(seed):
    model = Llama.load()
    arguments = [
        "--workers",
        "2",
        "--requests",
        "6",
        "--tokens",
        "30",
        "--num-blocks",
        "40",
        "--lease",
        "1",
        "--batch",
        "2",
    ]
    parser = cluster_demo.argparse.ArgumentParser()
    cluster_demo.add(parser.add_subparsers())
    options = parser.parse_args(["cluster-demo", *arguments])
    requests = cluster_demo.requests_of(options, model)
    with cluster_demo.Cluster(model, embedded_server(), options) as cluster:
        cluster.queue.put(requests)
        time.sleep(random.Random(seed).uniform(0.3, 4))
        cluster.processes["worker-1"].send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 120
        while not cluster.queue.done and time.monotonic() < deadline:
            time.sleep(0.1)
        results = cluster.queue.results()
        assert {name: result["text"] for name, result in results.items()} == {
            request.id: text_alone(model, request) for request in requests
        }
        while cluster.cache.num_free < 40 and time.monotonic() < deadline:
            time.sleep(0.1)
            cluster.cache.manager.reap()
        assert (cluster.cache.manager.allocator.ref_counts == 0).all()
    assert not left_over()


def test_what_a_killed_worker_held_comes_free_when_all_others_have_gone_home():
    """They may be through with its texts before its lease in the pool is over: then nobody else looks."""

    class Gone:
        killed, alive, blocks = {"worker-1"}, (), 3

        def __init__(self):
            self.queue = SimpleNamespace(done=True, results=lambda: {"r0": {"text": "x"}})
            self.cache = SimpleNamespace(manager=SimpleNamespace(reap=self.reap))

        def reap(self):
            self.blocks = 0

        def picture(self):
            return [cluster_demo.Row("worker-1", 1, "killed, over", [], 0, self.blocks, 0)], "1 of 1 texts"

    said = cluster_demo.watch(Gone(), [SimpleNamespace(id="r0", prompt="x")], kills=1)
    assert said == {"r0": {"text": "x"}}
