"""Readers of traces: every format, every kind of damage, and keys at other block sizes."""

import gzip
import json

import pytest
from needs import ROOT, absent

from pagedkv.serving import traces
from pagedkv.serving.traces import Trace, TraceError, TraceRequest

TRACES = ROOT.parent / "shared" / "data" / "traces"

MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]},
    {"timestamp": 1500, "input_length": 1, "output_length": 1, "hash_ids": [9]},
]
VLLM = [{"request_id": "b", "timestamp": 3.5, "input_length": 40, "output_length": 9, "hash_ids": [4, 5, 6]}]
SESSION = {
    "trace": "one",
    "block_size": 64,
    "requests": [
        {"t": 1.0, "type": "s", "model": "big", "in": 130, "out": 3, "hash_ids": [1, 2]},
        {"t": 1.0, "type": "n", "model": "small", "in": 64, "out": 3, "hash_ids": [1]},
        {"t": 4.0, "type": "s", "model": "big", "in": 70, "out": 3, "hash_ids": [1]},
    ],
}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:03.9799600,3180,8\r\n2023-11-16 18:17:04.0319600,110,27"
)
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
CHAT = SHAREGPT + "".join(
    f"{prompt},{output},0,0\n" for prompt, output in [(20, 30), (60, 40), (100, 5), (9, 3), (12, 4)]
)


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def trace(tmp_path):
    """A Trace of some text or bytes."""

    def made(content, **options):
        path = tmp_path / "trace.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return Trace(path, **options)

    return made


@pytest.fixture
def requests(trace):
    """Its requests."""
    return lambda content, **options: list(trace(content, **options))


def lengths(requests):
    return [(request.prompt, request.output) for request in requests]


# --- formats


@pytest.mark.parametrize(
    ("content", "format", "told"),
    [
        (lines(MOONCAKE), "mooncake", [(600, 5), (1024, 7), (1, 1)]),
        (lines(VLLM), "vllm", [(40, 9)]),
        (lines([SESSION]), "agentic", [(130, 3), (64, 3), (70, 3)]),
        (AZURE, "azure", [(4808, 10), (3180, 8), (110, 27)]),
        (CHAT, "sharegpt", [(20, 30), (60, 40), (100, 5), (9, 3), (12, 4)]),
        (SHAREGPT + "50,9,0,0\n20,9,0,0\n40,8,0,0\n", "lengths", [(50, 9), (20, 9), (40, 8)]),
        ("prompt,output\n3,4\n", "lengths", [(3, 4)]),
        ("Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n", "lengths", [(472, 18)]),
        (lines([{"input_length": 5, "output_length": 6}]), "lengths", [(5, 6)]),
    ],
    ids=[
        "mooncake",
        "vllm",
        "agentic",
        "azure",
        "sharegpt",
        "independent",
        "plain csv",
        "burstgpt",
        "plain json",
    ],
)
def test_each_format_is_told_and_read(trace, content, format, told):
    found = trace(content)
    assert found.format == format
    assert lengths(found) == told
    assert lengths(found) == told  # a trace can be read again
    assert lengths(trace(content, format=format)) == told


def test_mooncake_milliseconds_become_seconds_and_timestamps_may_repeat(requests):
    assert [request.arrival for request in requests(lines(MOONCAKE))] == [0, 0, 1.5]


def test_azure_seven_digits_line_ends_and_a_missing_last_one(requests):
    assert [request.arrival for request in requests(AZURE)] == pytest.approx([0, 0, 0.052])


def test_a_zone_and_fewer_digits_are_times_as_well(requests):
    text = AZURE.replace("9799600", "97").replace("0319600", "03+00:00")
    assert [request.arrival for request in requests(text)] == pytest.approx([0, 0, 0.06], abs=1e-6)


def test_time_starts_with_the_first_request(requests):
    assert requests(lines(VLLM))[0].arrival == 0


def test_a_trace_without_times_says_so(requests):
    assert {request.arrival for request in requests(CHAT)} == {None}


def test_models_of_a_session_share_nothing_and_neither_do_sessions(requests):
    big, small, again, *other = requests(lines([SESSION, SESSION]))
    assert (big.model, small.model, big.session) == ("big", "small", "one")
    assert big.blocks(64)[0] == again.blocks(64)[0]
    assert len({request.blocks(64)[0] for request in (big, small, *other[:2])}) == 4
    assert [request.arrival for request in (big, small, again, *other)] == [0, 0, 3, 3, 3, 6]


def test_models_of_plain_lines_share_nothing(requests):
    record = {"input_length": 16, "output_length": 1, "hash_ids": [7], "block_size": 16}
    a, b, c = requests(lines([record | {"model": name} for name in "aba"]))
    assert a.blocks(16) == c.blocks(16) != b.blocks(16)


def test_a_turn_shares_the_turns_before_it_and_a_new_conversation_nothing(requests):
    first, second, third, new, _ = (request.blocks(16) for request in requests(CHAT))
    assert second[:3] == first[:3]  # 50 tokens: three full blocks
    assert third[:6] == second[:6]
    assert not set(new) & set(third)


def test_a_limit_ends_within_a_line_too(requests):
    assert lengths(requests(lines([SESSION]), limit=2)) == [(130, 3), (64, 3)]
    assert requests(CHAT, limit=0) == []


@pytest.mark.parametrize(
    "content", ["", "\n\r\n\n", "\ufeff", SHAREGPT], ids=["empty", "blank", "BOM", "header"]
)
def test_a_file_without_requests_is_a_trace_without_requests(requests, content):
    assert requests(content) == []


@pytest.mark.parametrize("content", [lines(MOONCAKE), AZURE], ids=["json", "csv"])
def test_line_ends_marks_and_compression_change_nothing(requests, content):
    plain = requests(content)
    windows = ("\ufeff" + content.replace("\r", "").replace("\n", "\r\n")).encode()
    assert requests(windows) == plain
    assert requests(gzip.compress(windows)) == plain


# --- keys at other block sizes


def request(ids, prompt, id_tokens=512):
    return TraceRequest(1, 0.0, prompt, 1, ids, id_tokens, prompt)


@pytest.mark.parametrize(
    ("block_size", "keys"),
    [
        (512, [5, 6, 7]),
        (1024, [6, 7]),
        (1536, [7]),
        (2048, [7]),
        (256, [10, 11, 12, 13, 14]),  # 1100 tokens: four full blocks and 76 tokens
        (64, [*range(40, 56), 56, 57]),
    ],
)
def test_ids_are_joined_and_divided(block_size, keys):
    assert request([5, 6, 7], 1100).blocks(block_size) == keys


@pytest.mark.parametrize("block_size", [100, 500, 768, 1000, 3])
def test_other_block_sizes_are_refused(block_size):
    with pytest.raises(ValueError, match=f"must divide 512 or be a multiple of it, not {block_size}"):
        request([5], 100).blocks(block_size)


def test_the_keys_of_an_answer_are_known_where_the_trace_tells_them(requests):
    (only,) = requests(lines(VLLM))  # 40 + 9 tokens
    assert (only.blocks(16), only.blocks(8), only.blocks(32)) == ([4, 5, 6], [8, 9, 10, 11, 12, 13], [5, 6])


def test_keys_of_scopes_never_meet(requests):
    sizes = [request.blocks(1) for request in requests(CHAT)[2:4]]
    assert not set(sizes[0]) & set(sizes[1])


# --- damage

GOOD = MOONCAKE[0]
DAMAGED = [
    ('{"timestamp": 0, "input_len', "Unterminated"),
    ("[1, 2]", "a JSON object is expected"),
    ("null", "a JSON object is expected"),
    ("[" * 100_000, "recursion"),
    (b"\xff\xfe", "utf-8"),
    (GOOD | {"input_length": 0}, "input_length must be a whole number of at least 1, got 0"),
    (GOOD | {"input_length": -5}, "got -5"),
    (GOOD | {"input_length": 600.5}, "got 600.5"),
    (GOOD | {"input_length": True}, "got True"),
    (GOOD | {"input_length": None}, "got None"),
    (GOOD | {"input_length": 1e300}, "got 1e\\+300"),
    (GOOD | {"output_length": "many"}, "output_length .* got 'many'"),
    (GOOD | {"output_length": float("nan")}, "got nan"),
    (GOOD | {"hash_ids": [0]}, "600 tokens need 2 hash_ids of 512 tokens, not 1"),
    (GOOD | {"hash_ids": [0, "1"]}, "hash_ids must be a list of whole numbers"),
    (GOOD | {"hash_ids": [0, True]}, "hash_ids must be"),
    (GOOD | {"hash_ids": [0, -1]}, "hash_ids must be"),
    (GOOD | {"hash_ids": None}, "hash_ids must be"),
    (GOOD | {"hash_ids": [3, 3]}, "names a block twice"),
    (GOOD | {"timestamp": -1}, "timestamp goes back: -1"),
    (GOOD | {"timestamp": float("inf")}, "timestamp must be a number"),
    (GOOD | {"timestamp": "noon"}, "timestamp must be .* got 'noon'"),
    (GOOD | {"timestamp": False}, "timestamp must be"),
    (GOOD | {"model": 3}, "model must be a text"),
]


@pytest.mark.parametrize(("line", "message"), DAMAGED, ids=[message[:30] for _, message in DAMAGED])
def test_a_damaged_line_is_named_or_left_out(trace, line, message):
    line = json.dumps(line) if isinstance(line, dict) else line
    line = line if isinstance(line, bytes) else line.encode()
    content = b"\n".join([json.dumps(MOONCAKE[0]).encode(), b"", line, json.dumps(MOONCAKE[1]).encode()])
    with pytest.raises(TraceError, match=rf"(?i)trace.txt, line 3: .*{message}"):
        list(trace(content))
    lenient = trace(content, skip_bad=True)
    assert lengths(lenient) == [(600, 5), (1024, 7)]
    assert lenient.skipped == 1
    assert lenient.first_skipped.startswith("trace.txt, line 3:")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:17:04.1", "1 values for the 3 columns"),
        ("2023-11-16 18:17:04.1,1,2,3", "4 values"),
        ("2023-13-16 18:17:04.1,1,2", "timestamp"),
        ("2023-11-16 18:16:04.1,1,2", "goes back"),
        (",1,2", "timestamp must be a number or a date and time, got ''"),
        ('2023-11-16 18:17:04.1,"1,2', "unexpected end"),
        ("2023-11-16 18:17:04.1,,2", "contexttokens must be .* got ''"),
    ],
)
def test_a_damaged_row_is_named_or_left_out(trace, row, message):
    with pytest.raises(TraceError, match=f"line 5: .*{message}"):
        list(trace(f"{AZURE}\r\n{row}"))
    assert len(list(trace(f"{AZURE}\r\n{row}", skip_bad=True))) == 3


def test_a_damaged_line_leaves_time_and_conversation_as_they_were(requests):
    late = json.dumps(GOOD | {"timestamp": 10**6, "hash_ids": [3, 3]}) + "\n"
    found = requests(lines(MOONCAKE[:1]) + late + lines(MOONCAKE[1:]), skip_bad=True)
    assert [request.arrival for request in found] == [0, 0, 1.5]
    bad = CHAT.replace("60,40,0,0", "5,x,0,0\n60,40,0,0")
    assert [r.session for r in requests(bad, skip_bad=True)] == [r.session for r in requests(CHAT)]


def test_a_damaged_session_is_left_out_whole(trace):
    bad = json.loads(json.dumps(SESSION))
    bad["requests"][2]["hash_ids"] = []
    with pytest.raises(TraceError, match="line 2: request 3 of one: 70 tokens fill 1 blocks of 64, not 0"):
        list(trace(lines([SESSION, bad])))
    lenient = trace(lines([bad, SESSION, bad, SESSION]), skip_bad=True)
    assert (len(list(lenient)), lenient.skipped) == (6, 2)


def test_a_missing_timestamp_among_others_is_damage(trace):
    later = {"input_length": 5, "output_length": 6}
    with pytest.raises(TraceError, match="line 2: the timestamp is missing"):
        list(trace(lines([later | {"timestamp": 1}, later])))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a,b\n1,2\n", {}, "no column is called input_length"),
        ("ContextTokens\n1\n", {"skip_bad": True}, "no column is called output_length"),
        ("hello\n", {"format": "azure"}, "line 1: no column"),
        ("{\n{\n", {"skip_bad": True}, "none of the first lines is a JSON object; give its format"),
        (gzip.compress(b"x" * 10**5)[:60], {}, "trace.txt: damaged after line 0"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_even_leniently(trace, content, options, message):
    with pytest.raises(TraceError, match=message):
        list(trace(content, **options))


def test_a_line_without_end_does_not_fill_the_memory(trace, monkeypatch):
    monkeypatch.setattr(traces, "LONGEST_LINE", 1000)
    with pytest.raises(TraceError, match="line 1: over 1000 bytes long"):
        list(trace("[" + "1, " * 1000, format="lengths"))


def test_ids_of_unknown_size_are_refused_until_it_is_told(trace):
    line = lines([{"chat_id": 1, "timestamp": 2, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}])
    with pytest.raises(TraceError, match="how many tokens does a hash id stand for"):
        list(trace(line))
    (request,) = trace(line, id_tokens=16)
    assert request.blocks(16) == [1, 2]


@pytest.mark.parametrize("options", [{"format": "parquet"}, {"id_tokens": 0}])
def test_wrong_options(trace, options):
    with pytest.raises(ValueError, match=r"format must be one of|id_tokens must be"):
        trace("", **options)


def test_position_tells_the_progress(trace):
    found = trace(lines(MOONCAKE))
    places = [found.position for _ in found]
    assert places == sorted(set(places))
    assert places[-1] == found.size


# --- the published files


def published(name):
    path = TRACES / name
    if not path.exists():
        absent("the published traces (shared/data/traces) are not here")
    return Trace(path)


@pytest.mark.parametrize(
    ("name", "format", "requests", "prompt", "output", "exact"),
    [
        ("mooncake/conversation_trace.jsonl", "mooncake", 12_031, 12_035, 343, "mean"),
        ("azure2023/AzureLLMInferenceTrace_code.csv", "azure", 8_819, 1_500, 13, "median"),
        ("azure2023/AzureLLMInferenceTrace_conv.csv", "azure", 19_366, 1_020, 129, "median"),
        ("sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv", "sharegpt", 30_731, None, None, ""),
        ("arxiv_summarization/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", "lengths", 28_257,
         None, None, ""),
        ("vllm_rtx4090/workload_blocks16.jsonl", "vllm", 300, None, None, ""),
        ("agentic_coding/sample.jsonl", "agentic", 479, None, None, ""),
    ],
)  # fmt: skip
def test_published_traces_are_read_whole(name, format, requests, prompt, output, exact):
    trace = published(name)
    found = [(request.prompt, request.output, request.session) for request in trace]
    assert (trace.format, len(found)) == (format, requests)
    for column, value in enumerate((prompt, output)):
        sizes = sorted(row[column] for row in found)
        if exact == "mean":
            assert round(sum(sizes) / len(sizes)) == value
        elif exact == "median":
            assert sizes[len(sizes) // 2] == pytest.approx(value, rel=0.03)  # printed as round numbers
    if format == "sharegpt":
        assert len({session for *_, session in found}) == 5_678
