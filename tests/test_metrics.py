"""The numbers for Prometheus: what the engine did is what they say, under names that dashboards know."""

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
import yaml
from needs import ROOT, need_module, need_program
from pools import new_cache
from saved import wall

from pagedkv import BlockManager, PoolExhausted
from pagedkv.lm import Llama, Sampling, sample
from pagedkv.metrics import DASHBOARD, RULES, Histogram, Metrics
from pagedkv.serving.request import Request
from pagedkv.serving.scheduler import Scheduler
from pagedkv.store import load, save


def the_wall():
    """The four answers to `Good night` at the end of their blocks, and what was counted on the way there."""
    manager = BlockManager(8, 4)
    manager.add("a"), manager.extend("a", 10), manager.fork("a", ["b", "c", "d"])
    metrics = Metrics(manager)  # from here on: the answers
    for _ in range(2):
        manager.extend(list("abcd"))
    with pytest.raises(PoolExhausted):
        manager.extend(list("abcd"))
    return manager, metrics


# What the numbers mean


def test_the_counters_at_the_wall():
    manager, metrics = the_wall()
    read = metrics.read()
    assert read["pagedkv_appends_total"] == 8
    assert read["pagedkv_cow_clones_total"] == 3
    assert read['pagedkv_allocation_failures_total{reason="pool_exhausted"}'] == 1
    assert read["pagedkv_kv_cache_usage_perc"] == 0.75
    assert read['pagedkv_page_faults_total{kind="minor"}'] == 0
    assert read["pagedkv_allocation_latency_seconds_count"] == 2
    manager.free("d"), manager.extend(list("abc"))
    assert metrics.read()["pagedkv_kv_cache_usage_perc"] == 1.0  # full, and nothing is wrong
    assert metrics.read()['pagedkv_page_faults_total{kind="minor"}'] == 3


def test_usage_is_of_blocks_that_sequences_use():
    manager = BlockManager(10, 4, prefix_cache=True)
    metrics = Metrics(manager)
    manager.add("a", tokens=range(16)), manager.extend("a", 16), manager.commit("a")
    assert metrics.read()["pagedkv_kv_cache_usage_perc"] == 0.4
    manager.free("a")  # the blocks stay findable, and nobody uses them
    assert metrics.read()["pagedkv_kv_cache_usage_perc"] == 0


def test_the_hit_rate_is_hits_per_query_in_tokens():
    manager = BlockManager(10, 4, prefix_cache=True)
    metrics = Metrics(manager)
    for seq in "ab":
        manager.add(seq, tokens=range(10))
        manager.extend(seq, None)
        manager.commit(seq)
    read = metrics.read()
    assert read["pagedkv_prefix_cache_queries_total"] == 20
    assert read["pagedkv_prefix_cache_hits_total"] == 8
    assert read['pagedkv_page_faults_total{kind="minor"}'] == 3 + 1


def test_a_refused_copy_is_no_clone():
    manager = BlockManager(2, 4)
    metrics = Metrics(manager)
    manager.add("a"), manager.extend("a", 3), manager.fork("a", ["b", "c"])
    manager.extend("b")  # copies, and the pool is full
    for _ in range(3):
        with pytest.raises(PoolExhausted):
            manager.extend("c")
    read = metrics.read()
    assert read["pagedkv_cow_clones_total"] == 1
    assert read['pagedkv_allocation_failures_total{reason="pool_exhausted"}'] == 3
    assert read["pagedkv_appends_total"] == 4


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_block_lives_until_it_is_free_for_good():
    clock, manager = Clock(), BlockManager(4, 4, prefix_cache=True)
    metrics = Metrics(manager, clock=clock)
    manager.add("a", tokens=range(8)), manager.extend("a", 8), manager.commit("a")
    manager.extend("a", 2)
    clock.now += 5
    manager.free("a")  # the third block is given up, two stay findable
    assert (metrics.lifetime.count, metrics.lifetime.sum) == (1, 5.0)
    clock.now += 5
    manager.add("b", tokens=range(9)), manager.extend("b", None)  # both are found again: they live on
    assert metrics.lifetime.count == 1
    manager.free("b")
    clock.now += 5
    manager.add("c"), manager.extend("c", 16)  # both are evicted, after 15 seconds
    read = metrics.read()
    assert read["pagedkv_evicted_blocks_total"] == 2
    assert (metrics.lifetime.count, metrics.lifetime.sum) == (4, 5.0 + 0 + 15 + 15)


def test_a_reset_ends_what_was_only_findable():
    clock, manager = Clock(), BlockManager(4, 4, prefix_cache=True)
    metrics = Metrics(manager, clock=clock)
    manager.add("a", tokens=range(8)), manager.extend("a", 8), manager.commit("a"), manager.free("a")
    clock.now += 3
    manager.reset_prefix_cache()
    assert (metrics.lifetime.count, metrics.lifetime.sum) == (2, 6.0)


def test_a_clock_that_is_set_back_makes_no_lifetime_negative(monkeypatch):
    manager = BlockManager(4, 4)
    metrics = Metrics(manager)
    manager.add("a"), manager.extend("a", 8)
    monkeypatch.setattr(time, "time", lambda: -1e9)
    manager.free("a")
    assert metrics.lifetime.count == 2 and 0 <= metrics.lifetime.sum < 60


def test_every_way_to_free_a_block_ends_its_life():
    manager = BlockManager(16, 4)
    metrics = Metrics(manager, clock=Clock())
    manager.add("a"), manager.extend("a", 16), manager.fork("a", ["b"])
    manager.truncate("a", 8)
    assert metrics.lifetime.count == 0  # b still has them
    manager.truncate("b", 12)
    assert metrics.lifetime.count == 1
    manager.extend("a"), manager.reorder(["a", "b"], [1, 1])
    assert metrics.lifetime.count == 2
    manager.release_before("a", 4), manager.release_before("b", 4)
    assert metrics.lifetime.count == 3
    manager.free(["a", "b"])
    assert metrics.lifetime.count == 5 and np.isnan(metrics._born).all()


def test_snapshots_count_pages_bytes_and_damage(tmp_path):
    cache = wall()
    metrics = Metrics(cache)
    save(cache, tmp_path / "s.npz")
    data = bytearray((tmp_path / "s.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "s.npz").write_bytes(data)
    other = new_cache(8, 4)
    loaded = Metrics(other)
    load(tmp_path / "s.npz", other)
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path / "missing.npz", other)
    with pytest.raises(OSError, match="No such file"):
        save(cache, tmp_path / "nowhere" / "s.npz")
    saved, read = metrics.read(), loaded.read()
    assert saved['pagedkv_snapshots_total{operation="save",outcome="ok"}'] == 1
    assert saved['pagedkv_snapshots_total{operation="save",outcome="failed"}'] == 1
    assert saved['pagedkv_snapshot_bytes_total{operation="save"}'] == 6 * (48 + 2 * 128)
    assert saved['pagedkv_snapshot_duration_seconds_count{operation="save"}'] == 1
    assert read['pagedkv_corrupt_pages_total{tier="disk"}'] == 1
    assert read['pagedkv_page_faults_total{kind="major"}'] == 6
    assert read['pagedkv_snapshots_total{operation="load",outcome="failed"}'] == 1


def test_a_scheduler_tells_who_runs_waits_and_is_put_off():
    manager = BlockManager(8, 4)
    scheduler = Scheduler(manager, watermark=0)
    metrics = Metrics(manager)
    metrics.watch(scheduler)
    for number in range(3):
        scheduler.add(Request(number, num_tokens=8, max_new_tokens=12))
    seen = []
    while scheduler.unfinished:
        scheduler.advance(scheduler.schedule())
        read = metrics.read()
        seen.append((read["pagedkv_num_requests_running"], read["pagedkv_num_requests_waiting"]))
    assert (3, 0) in seen and any(waiting for _, waiting in seen)
    assert metrics.read()["pagedkv_num_preemptions_total"] > 0


def test_closed_metrics_count_no_more_and_others_go_on():
    manager = BlockManager(8, 4)
    one, two = Metrics(manager), Metrics(manager)
    one.close(), one.close()
    manager.add("a"), manager.extend("a", 3)
    assert (one.appended, two.appended) == (0, 3)


def test_a_histogram_counts_each_value_at_its_bound():
    one, many = Histogram([1.0, 2.0, 4.0]), Histogram([1.0, 2.0, 4.0])
    values = [0.0, 1.0, 1.5, 2.0, 4.0, 4.1, 99.0]
    for value in values:
        one.observe(value)
    many.observe_many(np.array(values))
    many.observe_many(np.array([]))
    assert one.counts == many.counts == [2, 2, 1, 2]
    assert one.sum == many.sum == sum(values)
    assert one.buckets() == [("1.0", 2), ("2.0", 4), ("4.0", 5), ("+Inf", 7)]


@pytest.mark.parametrize("namespace", ["", "vLLM", "vllm:", None])
def test_an_unknown_namespace_is_refused(namespace):
    manager = BlockManager(8, 4)
    with pytest.raises(ValueError, match='"pagedkv" or "vllm"'):
        Metrics(manager, namespace=namespace)
    assert manager.observers == []


# What is exported


def exposed(metrics):
    """What a scrape gets."""
    client = need_module("prometheus_client", "metrics")
    registry = client.CollectorRegistry()
    registry.register(metrics)
    return client.generate_latest(registry).decode()


def names_in(text):
    return set(re.findall(r"^([a-zA-Z_:]+)", text, re.MULTILINE))


def test_a_scrape_says_what_read_says():
    _, metrics = the_wall()
    text = exposed(metrics)
    for name, value in metrics.read().items():
        assert f"{name} {float(value)}\n" in text, name


def test_names_are_vllms_where_it_has_them():
    cache = new_cache(8, 4)
    text = exposed(Metrics(cache, namespace="vllm", labels={"model_name": "tiny"}))
    expected = """vllm:kv_cache_usage_perc vllm:num_requests_running vllm:num_requests_waiting
        vllm:num_preemptions_total vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
        vllm:cache_config_info vllm:kv_block_lifetime_seconds_bucket pagedkv_cow_clones_total"""
    assert set(expected.split()) <= names_in(text)
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in text
    assert re.search(r'vllm:cache_config_info\{.*num_gpu_blocks="8".*\} 1.0', text)
    ours = names_in(exposed(Metrics(new_cache(8, 4))))
    assert {name.replace("vllm:", "pagedkv_") for name in names_in(text)} == ours


def test_labels_stand_on_every_number():
    lines = exposed(Metrics(new_cache(8, 4), labels={"host": "a"})).splitlines()
    assert all('host="a"' in line for line in lines if not line.startswith("#"))


def test_the_package_can_count_without_prometheus_client(monkeypatch):
    _, metrics = the_wall()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert metrics.read()["pagedkv_cow_clones_total"] == 3
    with pytest.raises(ImportError, match=r'pip install "pagedkv\[metrics\]"'):
        list(metrics.collect())


def queried(expression):
    return set(re.findall(r"\b(pagedkv_[a-z_]+)", re.sub(r"instance:\S+?:\w+", "", expression)))


def test_every_metric_of_the_dashboard_is_exported():
    exported = names_in(exposed(Metrics(new_cache(8, 4))))
    board = json.loads(DASHBOARD.read_text("utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(expressions) >= 14
    for expression in expressions + variables:
        assert queried(expression) and queried(expression) <= exported, expression
    shown = set().union(*map(queried, expressions + variables))
    ignored = ("_created", "_sum", "_count")
    assert {name for name in exported - shown if not name.endswith(ignored)} == set()


def test_every_metric_of_the_rules_is_exported():
    exported = names_in(exposed(Metrics(new_cache(8, 4))))
    (group,) = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
    for rule in group["rules"]:
        assert queried(rule["expr"]) <= exported
        assert set(re.findall(r"instance:\S+?:\w+", rule["expr"])) <= recorded
        if "alert" in rule:
            assert {"summary", "description"} <= set(rule["annotations"])


# With Prometheus' own programs


def promtool(*args, **options):
    command = [need_program("promtool", "apt-get install prometheus"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_promtool_has_nothing_to_say_about_our_names():
    _, metrics = the_wall()
    result = promtool("check", "metrics", input=exposed(metrics))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_promtool_accepts_the_rules():
    result = promtool("check", "rules", RULES)
    assert result.returncode == 0 and "SUCCESS" in result.stdout, result.stderr


INCIDENTS = [  # what was seen, a sample a minute, and the one alert that is on after an hour, or two
    ({"pagedkv_kv_cache_usage_perc": "1x60"}, None),  # full: no incident by itself
    ({"pagedkv_num_preemptions_total": "0+60x60"}, "PagedKVPreempting"),
    (
        {
            'pagedkv_allocation_failures_total{reason="pool_exhausted"}': "0+300x60",
            "pagedkv_num_requests_waiting": "5x60",
        },
        "PagedKVRefusing",
    ),
    (  # refused and tried again, while nobody waits
        {
            'pagedkv_allocation_failures_total{reason="pool_exhausted"}': "0+300x60",
            "pagedkv_num_requests_waiting": "0x60",
        },
        None,
    ),
    (
        {
            "pagedkv_evicted_blocks_total": "0+600x60",
            "pagedkv_prefix_cache_queries_total": "0+1000x60",
            "pagedkv_prefix_cache_hits_total": "0+10x60",
        },
        "PagedKVThrashing",
    ),
    (  # evicted, but what comes back is found
        {
            "pagedkv_evicted_blocks_total": "0+600x60",
            "pagedkv_prefix_cache_queries_total": "0+1000x60",
            "pagedkv_prefix_cache_hits_total": "0+500x60",
        },
        None,
    ),
    (  # after a rollout nothing is found any more, and nothing is evicted either
        {
            "pagedkv_prefix_cache_queries_total": "0+1000x120",
            "pagedkv_prefix_cache_hits_total": "0+800x90 72100+100x30",
        },
        "PagedKVHalfAsMuchFound",
    ),
    (  # a little less is found
        {
            "pagedkv_prefix_cache_queries_total": "0+1000x120",
            "pagedkv_prefix_cache_hits_total": "0+800x90 72500+500x30",
        },
        None,
    ),
    ({'pagedkv_corrupt_pages_total{tier="disk"}': "0x30 1x30"}, "PagedKVCorruptPages"),
    ({'pagedkv_snapshots_total{operation="save",outcome="failed"}': "0x50 1x10"}, "PagedKVSnapshotFailed"),
    ({'pagedkv_snapshots_total{operation="save",outcome="ok"}': "0+1x60"}, None),
    ({"pagedkv_coordinator_reclaimed_blocks_total": "0x55 7x5"}, "PagedKVWorkersDie"),
]


def incident(series, alert):
    """A test of promtool: the alerts that are on at the end."""

    def labelled(name):
        return (
            name.replace("{", '{instance="a",job="j",') if "{" in name else f'{name}{{instance="a",job="j"}}'
        )

    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    end = "120m" if any("x120" in values for values in series.values()) else "60m"
    question = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": [{"series": labelled(name), "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": question, "eval_time": end, "exp_samples": firing}],
    }


def test_the_right_alert_fires_and_no_other(tmp_path):
    tests = [incident(*what) for what in INCIDENTS]
    spec = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "incidents.yml").write_text(yaml.safe_dump(spec))
    result = promtool("test", "rules", tmp_path / "incidents.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    alerts = {
        rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"] if "alert" in rule
    }
    assert alerts == {alert for _, alert in INCIDENTS if alert}


PATIENCE = 60  # seconds; only how long a broken server is waited for


def ask(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def eventually(question):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            answer = question()
        except OSError:
            answer = None
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError("Prometheus did not answer in time")


@pytest.fixture
def server(tmp_path):
    """A real Prometheus that scrapes a port of ours ten times a second: yields (url, where to serve)."""
    program = need_program("prometheus")
    client = need_module("prometheus_client", "metrics")
    registry = client.CollectorRegistry()
    httpd, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "pagedkv", "static_configs": [{"targets": [f"127.0.0.1:{httpd.server_port}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        program,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: urllib.request.urlopen(f"{url}/-/ready", timeout=10).status == 200)
        yield url, registry
    finally:
        process.terminate()
        process.wait(PATIENCE)
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def query(url, expression):
    """The one number that an instant query returns, or None."""
    answer = ask(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    assert answer["status"] == "success"
    result = answer["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def test_prometheus_scrapes_a_running_generation(server):
    """Its queries return what the engine counted: usage, clones, p99 of allocation, hit rate."""
    url, registry = server
    model = Llama.load()
    cache = model.new_cache(64, 4, prefix_cache=True)
    metrics = Metrics(cache)
    registry.register(metrics)
    eventually(lambda: query(url, "up") == 1 and query(url, "pagedkv_appends_total") == 0)
    prompt = model.tokenizer.encode("Good night, good night")
    for seq in "ab":  # the second prompt finds the first one's blocks
        cache.add(seq, tokens=prompt)
        reservation = cache.extend(seq, None)
        keys = np.zeros(
            (len(reservation.slots), model.config.num_kv_heads, model.config.head_dim), np.float32
        )
        for layer in range(model.config.num_layers):
            cache.write(layer, reservation, keys, keys)
        cache.commit(seq)
    texts = sample(
        model, cache, prompt, 16, num_samples=4, sampling=Sampling(), random=np.random.default_rng(0)
    )
    for step, _ in enumerate(texts):
        if step == 8:  # in the middle of it
            usage = 1 - cache.num_free / cache.num_blocks
            assert eventually(lambda: query(url, "pagedkv_appends_total") == metrics.appended)
            assert query(url, "pagedkv_kv_cache_usage_perc") == pytest.approx(usage)
            assert 0 < usage < 1
    counted = metrics.read()
    assert eventually(lambda: query(url, "pagedkv_appends_total") == metrics.appended)
    assert counted["pagedkv_cow_clones_total"] == 3
    for name in (
        "pagedkv_cow_clones_total",
        "pagedkv_prefix_cache_hits_total",
        "pagedkv_prefix_cache_queries_total",
    ):
        assert query(url, name) == counted[name]
    hit_rate = counted["pagedkv_prefix_cache_hits_total"] / counted["pagedkv_prefix_cache_queries_total"]
    ratio = "pagedkv_prefix_cache_hits_total / pagedkv_prefix_cache_queries_total"
    assert query(url, ratio) == pytest.approx(hit_rate) and 0 < hit_rate < 1
    clones = query(url, "increase(pagedkv_cow_clones_total[1h])")
    assert 3 <= clones < 6 and query(url, "rate(pagedkv_cow_clones_total[1h])") > 0
    p99 = query(url, "histogram_quantile(0.99, pagedkv_allocation_latency_seconds_bucket)")
    buckets = metrics.latency.buckets()
    rank = 0.99 * metrics.latency.count
    place = next(i for i, (_, n) in enumerate(buckets) if n >= rank)
    assert (0 if place == 0 else float(buckets[place - 1][0])) <= p99 <= float(buckets[place][0])
    assert query(url, "count(pagedkv_allocation_latency_seconds_bucket)") == len(buckets)
    groups = ask(f"{url}/api/v1/rules")["data"]["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
    assert str(ROOT) in groups[0]["file"]
