"""GGUF files: a network like SmolLM2's can be read, everything else is refused by name."""

import hashlib
import struct

import numpy as np
import pytest
from needs import need_module

from pagedkv.lm import WeightsError, smollm2
from pagedkv.lm.gguf import GGUF
from pagedkv.lm.weights import Weights

gguf = need_module("gguf", "model")
need_module("tokenizers", "model")
Kind = gguf.GGMLQuantizationType

PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 60)), "..", "Ġ"]
MATRICES = {  # of a tiny network: 2 query heads of 16 on 1 key and value head, width 32
    "token_embd": (32, 32),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}


def tiny(path, *, facts=(), tensors=(), without=(), architecture="llama"):
    """Write a network of two layers; facts and tensors replace those of the same name."""
    writer = gguf.GGUFWriter(path, architecture)
    random = np.random.default_rng(0)
    known = {
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.merges": [". ."],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | dict(facts)
    for name, value in known.items():
        if name not in without:
            add = {
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }
            add[type(value)](name, value)
    arrays = {"output_norm": np.ones(32, np.float32), "token_embd": None}
    for layer in range(2):
        arrays |= {f"blk.{layer}.{name}": None for name in MATRICES if name != "token_embd"}
        arrays |= {f"blk.{layer}.{name}": np.ones(32, np.float32) for name in ("attn_norm", "ffn_norm")}
    for name in arrays:
        if arrays[name] is None:
            arrays[name] = random.standard_normal(MATRICES[name.split(".")[-1]], np.float32)
    for name, array in (arrays | dict(tensors)).items():
        if name in without:
            continue
        if isinstance(array, tuple):  # bytes of another type
            raw, kind = array
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
        elif array.ndim == 1:
            writer.add_tensor(f"{name}.weight", array)
        else:
            kind = Kind.Q8_0 if name == "token_embd" else Kind.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_it_runs_over_pages_and_turns_pairs_as_llama_cpp_does(path):
    """Rows 2 i and 2 i + 1 of a head in the file are features i and i + 8 here."""
    told = []
    model = smollm2.llama(GGUF(path), progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 20) for i in range(1, 21)]
    raw = GGUF(path).read("blk.1.attn_q.weight", (32, 32))
    query = Weights(model.embedding, model.layers, model.final_norm).named()[
        "model.layers.1.self_attn.q_proj.weight"
    ]
    for head in range(2):
        for i in range(8):
            np.testing.assert_array_equal(query[16 * head + i], raw[16 * head + 2 * i])
            np.testing.assert_array_equal(query[16 * head + i + 8], raw[16 * head + 2 * i + 1])
    cache = model.new_cache(8, 4, poison=True)
    cache.add("a")
    tokens = np.arange(3, 20)
    logits = [model.forward(cache, "a", [part]) for part in (tokens[:7], tokens[7:16], tokens[16:])]
    np.testing.assert_allclose(np.concatenate(logits), model.forward_full(tokens), atol=1e-4)


HALF = np.zeros((32, 34), np.uint8)  # Q8_0 of [32, 32]


def spoilt(value):
    """Q8_0 with one scale that is not a number."""
    blocks = HALF.copy()
    blocks[7, :2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return blocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "qwen2", "facts": {}}, "is a qwen2; a llama was expected"),
        ({"without": ["llama.block_count"]}, "llama.block_count is not in it; int was expected"),
        ({"facts": {"llama.block_count": "two"}}, "llama.block_count is 'two'; int was expected"),
        ({"facts": {"llama.embedding_length": 0}}, "llama.embedding_length is 0; 1 to"),
        ({"facts": {"llama.rope.dimension_count": 15}}, "heads that cannot be grouped or turned"),
        ({"facts": {"llama.attention.head_count_kv": 3}}, "heads that cannot be grouped or turned"),
        ({"facts": {"llama.block_count": 3}}, "lacks the tensor blk.2.attn_norm.weight [32]"),
        ({"facts": {"llama.block_count": 1}}, "has the tensor blk.1"),
        ({"without": ["blk.0.ffn_up"]}, "lacks the tensor blk.0.ffn_up.weight [64, 32]"),
        (
            {"tensors": {"output": np.ones(32, np.float32)}},
            "has the tensor output.weight, which this network has no",
        ),
        (
            {"tensors": {"output_norm": np.ones(33, np.float32)}},
            "output_norm.weight is F32 [33], [32] was expected",
        ),
        (
            {"tensors": {"output_norm": np.full(32, np.nan, np.float32)}},
            "output_norm.weight has numbers that are not",
        ),
        (
            {"tensors": {"token_embd": (spoilt(np.inf), Kind.Q8_0)}},
            "token_embd.weight has numbers that are not",
        ),
        (
            {"tensors": {"token_embd": (np.zeros((32, 18), np.uint8), Kind.Q4_0)}},
            "token_embd.weight is of type Q4_0",
        ),
        (
            {"tensors": {"output_norm": np.ones(32, np.float16)}},
            "output_norm.weight is of type F16; what can be read",
        ),
        ({"facts": {"tokenizer.ggml.pre": "gpt-2"}}, "has a tokenizer ('gpt2', 'gpt-2')"),
        ({"facts": {"tokenizer.ggml.eos_token_id": 32}}, "has 32 tokens, but names 32"),
        (
            {"facts": {"tokenizer.ggml.tokens": PIECES[:-1]}},
            "token_embd.weight is Q8_0 [32, 32], [31, 32] was",
        ),
        ({"facts": {"tokenizer.ggml.tokens": ["a"] * 32}}, "damaged"),
        ({"facts": {"tokenizer.ggml.merges": ["x y"]}}, "pieces and merges do not fit together"),
        ({"facts": {"llama.context_length": 1 << 31}}, "llama.context_length is 2147483648; 1 to"),
        ({"facts": {"llama.rope.freq_base": float("nan")}}, "llama.rope.freq_base is nan; a number above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_network_is_refused_by_name(tmp_path, change, message):
    path = tiny(tmp_path / "other.gguf", **change)
    with pytest.raises(WeightsError) as caught:
        smollm2.llama(GGUF(path))
    assert message in str(caught.value)
    assert "other.gguf" in str(caught.value)


def test_a_file_that_is_not_quite_the_right_one_is_never_parsed(path, tmp_path, monkeypatch):
    """Cut anywhere, any bit flipped: the sum of the whole file says so before its header is believed."""
    content, random = path.read_bytes(), np.random.default_rng(1)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    assert smollm2.load(path).config.num_layers == 2
    monkeypatch.setattr(smollm2, "GGUF", None)
    damaged = tmp_path / "damaged.gguf"
    for trial in range(200):
        changed = bytearray(content)
        changed[random.integers(len(content))] ^= 1 << random.integers(8)
        damaged.write_bytes(changed if trial % 2 else content[: random.integers(len(content))])
        with pytest.raises(WeightsError, match=r"damaged\.gguf is damaged or another file: sha256 .* it has"):
            smollm2.load(damaged)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" * 20, b"GGUF" + struct.pack("<I", 9) + b"\0" * 90])
def test_what_is_no_gguf_file_is_refused(tmp_path, content):
    (tmp_path / "no.gguf").write_bytes(content)
    with pytest.raises(WeightsError, match=r"no\.gguf is damaged, or no GGUF file"):
        GGUF(tmp_path / "no.gguf")


def test_a_file_that_is_not_there_is_named(tmp_path):
    for read in (smollm2.load, GGUF):
        with pytest.raises(WeightsError, match=r"gone\.gguf cannot be read: .*No such file"):
            read(tmp_path / "gone.gguf")
