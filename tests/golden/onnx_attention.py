"""The attention node tests recorded in the onnx package, read as decode calls.

The operators attend with whole matrices and masks (https://onnx.ai/onnx/operators/onnx__Attention.html). Every
query row of such a test is one decode call, if the keys that it may see are the first ones and nothing is added
to its scores; other rows need a mask that a decoder does not have, and are left out.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NOT_CASES = "_expanded"  # the same vectors again, for a graph of simpler operators
UNDERSTOOD = {"q_num_heads", "kv_num_heads", "scale", "softcap", "is_causal", "qk_matmul_output_mode"}


@dataclass(frozen=True)
class Call:
    """One query over the keys that it sees."""

    test: str
    query: np.ndarray  # [num_q_heads, head_dim]
    keys: np.ndarray  # [length, num_kv_heads, head_dim]
    values: np.ndarray  # [length, num_kv_heads, value_dim]
    scale: float
    soft_cap: float | None
    expected: np.ndarray  # [num_q_heads, value_dim]


def read_calls(onnx) -> tuple[list[Call], Counter]:
    """All decode calls of the installed onnx package, and what was left out: reason -> how often."""
    calls: list[Call] = []
    left_out: Counter = Counter()
    tests = Path(onnx.__file__).parent / "backend/test/data/node"
    for folder in sorted([*tests.glob("test_attention_*"), *tests.glob("test_flexattention*")]):
        if NOT_CASES in folder.name:
            continue
        node, inputs, outputs = _load(onnx, folder)
        options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if {"score_mod", "prob_mod"} & set(options):
            left_out["tests with a graph that modifies scores"] += 1
            continue
        unknown = set(options) - UNDERSTOOD
        assert not unknown, f"{folder.name} has attributes that this reader does not know: {unknown}"
        for call in _rows(folder.name, inputs, outputs, options):
            if isinstance(call, str):
                left_out[call] += 1
            else:
                calls.append(call)
    return calls, left_out


def _load(onnx, folder):
    """The node of a test, and its recorded inputs and outputs in the node's order (None where absent)."""
    graph = onnx.load(folder / "model.onnx").graph
    (node,) = graph.node

    def arrays(kind, infos, names):
        recorded = {}
        for i, info in enumerate(infos):
            tensor = onnx.load_tensor(folder / "test_data_set_0" / f"{kind}_{i}.pb")
            recorded[info.name] = onnx.numpy_helper.to_array(tensor)
        return [recorded.get(name) for name in names]

    return node, arrays("input", graph.input, node.input), arrays("output", graph.output, node.output)


def _rows(test, inputs, outputs, options):
    """Yield a Call for every query row of a test, or the reason why it is none."""
    query, keys, values, mask, past_keys, past_values, num_valid = [*inputs, *[None] * (7 - len(inputs))]
    heads, kv_heads = options.get("q_num_heads"), options.get("kv_num_heads")
    query, expected = _split(query, heads), _split(outputs[0], heads)  # [batch, heads, n, dim]
    keys, values = _split(keys, kv_heads), _split(values, kv_heads)  # [batch, kv_heads, length, dim]
    past = 0
    if past_keys is not None:
        past = past_keys.shape[2]
        keys, values = np.concatenate([past_keys, keys], 2), np.concatenate([past_values, values], 2)
    batch, heads, n, _ = query.shape
    length = keys.shape[2]

    bias = np.zeros((batch, heads, n, length))  # what is added to the scores; −inf hides a key
    if mask is not None:
        mask = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(float)
        short = length - mask.shape[-1]  # a mask may end early: keys behind it are hidden
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=-np.inf)
        bias = bias + mask
    if num_valid is not None:
        bias[np.broadcast_to(np.arange(length) >= num_valid[:, None, None, None], bias.shape)] = -np.inf
    if options.get("is_causal"):
        assert num_valid is None, f"{test}: causal and padded, nobody has needed it yet"
        bias[..., np.arange(length) > past + np.arange(n)[:, None]] = -np.inf

    for b, i in np.ndindex(batch, n):
        hidden = np.isneginf(bias[b, :, i])  # [heads, length]
        seen = int((~hidden[0]).sum())
        if bias[b, :, i][~hidden].any():
            yield "rows with a bias on visible keys"
        elif hidden[:, :seen].any() or not hidden[:, seen:].all() or not seen:
            yield "rows whose visible keys are not the first ones"
        else:
            yield Call(
                test,
                query[b, :, i],
                keys[b, :, :seen].transpose(1, 0, 2),
                values[b, :, :seen].transpose(1, 0, 2),
                options.get("scale") or query.shape[-1] ** -0.5,
                options.get("softcap") or None,
                expected[b, :, i],
            )


def _split(array, heads):
    """[batch, heads, n, dim], also of [batch, n, heads · dim]."""
    if array.ndim == 4:
        return array
    batch, n, width = array.shape
    return array.reshape(batch, n, heads, width // heads).transpose(0, 2, 1, 3)
