"""What is written: JSON that others can read, Markdown that says the same, charts of what was measured."""

import itertools
import json

import pytest

from pagedkv.bench import PEERS, Shape, Workload, bookkeeping, charts, compare, report, sweeps
from pagedkv.bench.goals import judge
from pagedkv.bench.measure import machine

TINY = Shape("b8", (3, 9), 4, 2, 8, block_size=4)

ROW = {
    "shape": str, "peer": str, "dtype": str, "threads": int, "round_of": int, "block_size": int, "batch": int,
    "num_tokens": int, "num_bytes": float, "error": float, "bandwidth": float, "samples": list, "correct": bool,
    "seconds": float, "p20": float, "p80": float, "tokens_per_second": float, "ns_per_token": float,
    "bytes_per_second": float, "bandwidth_share": float,
}  # fmt: skip
POINT = {"seconds": float, "p20": float, "p80": float, "ns_per_token": float, "correct": bool}
MEMORY = {"blocks": int, "blocks_unshared": int, "utilisation": float, "waste": float}


@pytest.fixture(scope="module")
def results():
    quick = {"seconds": 0}
    return {
        "machine": machine(),
        "read_bandwidth": 1e10,
        "rows": compare(Workload(TINY), ["paged", "numpy-padded", "seed"], bandwidth=1e10, seconds=0),
        "sweeps": {
            "lengths": sweeps.lengths([2, 4], batch=2, **quick),
            "batches": sweeps.batches([1, 2], length=4, **quick),
            "block_sizes": sweeps.block_sizes(TINY, [2, 8], **quick),
            "head_dims": sweeps.head_dims(TINY, [8, 16], **quick),
            "beam_widths": sweeps.beam_widths([1, 2], prefix=16, **quick),
            "bookkeeping": bookkeeping.per_batch([1, 8], 1),
        },
        "bookkeeping": bookkeeping.rows(1),
        "model": [],
        "absent": ["torch is not installed"],
    }


def has(values, schema):
    return {key: type(values[key]) for key in schema} == schema


def test_the_json_has_every_figure_in_its_type(results, tmp_path):
    report.write(results, [], tmp_path / "new" / "folder")
    read = json.loads((tmp_path / "new" / "folder" / "results.json").read_text("utf-8"))
    assert read["format"] == report.FORMAT
    assert {"processor", "blas_kernel"} <= read["machine"].keys()
    assert [row["peer"] for row in read["rows"]] == ["paged", "numpy-padded", "seed"]
    assert all(has(row, ROW) and set(row) == set(ROW) for row in read["rows"])
    for name in ("lengths", "batches"):
        assert all(has(point, POINT) for point in read["sweeps"][name])
    for name in ("block_sizes", "head_dims", "beam_widths"):
        assert all(has(point, POINT | MEMORY) for point in read["sweeps"][name])
    assert has(read["bookkeeping"][0], {"name": str, "seconds": float, "over": float})


def test_a_variant_that_never_ran_is_valid_json(results):
    (row,) = compare(Workload(TINY), ["paged"], seconds=0)
    row.samples, row.error = [], float("nan")
    spoiled = results | {"rows": [row]}
    again = json.loads(json.dumps(report.as_json(spoiled), allow_nan=False))
    assert (again["rows"][0]["seconds"], again["rows"][0]["error"]) == (None, None)
    assert report.wrong(spoiled) == ["paged float32 on b8 is off by nan of the largest |V|"]
    assert "**wrong" in report.markdown(spoiled)


def test_the_markdown_has_every_part(results):
    text = report.markdown(results, judge(results))
    for part in ("Shape b8", "Block size", "Beam width", "Bookkeeping", "Goals", "Not measured"):
        assert f"## {part}" in text
    for row in results["rows"]:
        assert PEERS[row.peer].about in text


def test_every_table_is_rectangular(results):
    lines = report.markdown(results, judge(results)).splitlines()
    for before, line in itertools.pairwise(lines):
        if before.startswith("|") and line.startswith("|"):
            assert len(before) == len(line)
            assert before.count("|") == line.count("|")


def test_right_results_are_not_called_wrong_and_wrong_ones_are_named(results):
    assert report.wrong(results) == []
    spoiled = results | {
        "sweeps": {"block_sizes": [{"block_size": 4, "correct": False}]},
        "model": [{"batch": 8, "difference": float("nan")}, {"batch": 1, "difference": 1e-5}],
    }
    assert report.wrong(spoiled) == ["block size 4", "the model at batch 8: logits differ by nan"]


def test_waste_is_the_slots_behind_the_tails_and_sharing_saves_blocks(results):
    found = {p["block_size"]: p for p in results["sweeps"]["block_sizes"]}  # lengths 3 and 9
    assert (found[2]["blocks"], found[8]["blocks"]) == (2 + 5, 1 + 2)
    assert (found[2]["waste"], found[8]["waste"]) == (1 - 12 / 14, 1 - 12 / 24)
    alone, two = results["sweeps"]["beam_widths"]
    assert (alone["blocks"], alone["blocks_unshared"]) == (5, 5)
    assert (two["blocks"], two["blocks_unshared"]) == (1 + 4 + 4, 10)


def test_charts_are_drawn_of_what_there_is(results, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    files = charts.draw(results, tmp_path)
    assert {f.stem for f in files} == {
        "linear", "block_sizes", "head_dims", "beam_widths", "bookkeeping", "kernels_b8",
    }  # fmt: skip
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)
    assert charts.draw(results | {"rows": [], "sweeps": {}}, tmp_path) == []


@pytest.mark.parametrize(
    ("high", "says"), [(1.0, "Blocks of 16 are fastest"), (1.3, "Blocks of 16 and 32 tie within the spread")]
)
def test_a_block_size_is_called_fastest_only_if_its_spread_says_so(high, says):
    points = [(8, 1.9, 2.0, 2.1), (16, 0.9, 1.0, high), (32, 1.1, 1.2, 1.3)]
    names = ("block_size", "p20", "seconds", "p80")
    assert charts._fastest([dict(zip(names, point, strict=True)) for point in points]) == says
