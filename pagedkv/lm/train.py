"""Trains the small language model that ships with the package: one character, one token.

    pip install "pagedkv[train]"
    python -m pagedkv.lm.train --text tinyshakespeare.txt

The network is the Llama decoder of `pagedkv.lm.model`, written once more in torch because torch can differentiate it.
The parameters carry the names of transformers' `LlamaForCausalLM`, so its weights and ours are the same file.
The first 90 % of the text is for training, the last 10 % for validation. Three files are written, first after a few
hundred steps and then again and again until the end: NAME.npz (float16 arrays), NAME.json (shape, vocabulary, loss,
checksum) and CARD.md.
"""

import argparse
import hashlib
import json
import math
import time
from pathlib import Path

import numpy as np

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from tqdm import tqdm
except ImportError as error:
    raise ImportError('training needs torch and tqdm: pip install "pagedkv[train]"') from error

SHAPE = {
    "num_layers": 4,
    "width": 128,
    "hidden": 344,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "context": 512,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
WARM_UP, LOWEST_RATE = 100, 0.02  # steps; share of the highest rate at the end
FIRST = 20  # windows at the start of the validation split, whose loss is stored for a quick check
DATA = (
    "`tinyshakespeare.txt`: 40,000 lines of Shakespeare's plays (public domain), as collected in "
    "karpathy/char-rnn, `data/tinyshakespeare/input.txt`"
)


# --- the network ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, shape: dict):
        super().__init__()
        width, self.head_dim = shape["width"], shape["head_dim"]
        self.q_proj = nn.Linear(width, shape["num_q_heads"] * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape["num_kv_heads"] * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape["num_kv_heads"] * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape["num_q_heads"] * self.head_dim, width, bias=False)

    def forward(self, x, cos, sin):  # x [batch, length, width]    cos, sin [length, head_dim]
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)  # [batch, q_heads, length, head_dim]
        k = rotate(
            self.k_proj(x).view(heads).transpose(1, 2), cos, sin
        )  # [batch, kv_heads, length, head_dim]
        v = self.v_proj(x).view(heads).transpose(1, 2)  # [batch, kv_heads, length, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [batch, length, width]


class MLP(nn.Module):
    def __init__(self, shape: dict):
        super().__init__()
        self.gate_proj = nn.Linear(shape["width"], shape["hidden"], bias=False)
        self.up_proj = nn.Linear(shape["width"], shape["hidden"], bias=False)
        self.down_proj = nn.Linear(shape["hidden"], shape["width"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: dict):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape["width"], shape["norm_eps"])
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape["width"], shape["norm_eps"])
        self.mlp = MLP(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """The decoder; the output layer is the embedding itself ("tied")."""

    def __init__(self, shape: dict, vocabulary_size: int):
        super().__init__()
        self.model = nn.Module()  # only so that the parameters are called model.…, as in transformers
        self.model.embed_tokens = nn.Embedding(vocabulary_size, shape["width"])
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape["num_layers"]))
        self.model.norm = nn.RMSNorm(shape["width"], shape["norm_eps"])
        cos, sin = rotations(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(initialise)
        for (
            name,
            weight,
        ) in self.named_parameters():  # what adds to the residual stream starts smaller (GPT-2)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape["num_layers"]))

    def forward(self, tokens):  # tokens [batch, length]
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.model.embed_tokens(tokens)  # [batch, length, width]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x) @ self.model.embed_tokens.weight.T  # [batch, length, vocabulary]


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def rotations(shape: dict):
    """Cosine and sine of RoPE's angles for every position: two [context, head_dim]."""
    half = torch.arange(0, shape["head_dim"], 2) / shape["head_dim"]
    angles = torch.outer(torch.arange(shape["context"]).float(), shape["rope_theta"] ** -half)
    angles = torch.cat([angles, angles], dim=1)  # feature i turns with feature i + head_dim / 2
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):  # x [batch, heads, length, head_dim]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# --- training ---------------------------------------------------------------------------------------------------


def train(
    text: str, out: Path, *, steps: int, seed: int, batch: int, rate: float, every: int, shape: dict
) -> float:
    """Trains the network on a text and writes it; returns the validation loss of what was written.

    Args:
        text: the whole text; its distinct characters become the vocabulary.
        out: the .npz to write; the .json and CARD.md go beside it.
        steps: optimiser steps, each over `batch` windows of `shape["context"]` characters; three quarters of them cut
            the windows in two, which is faster and teaches nearly as much.
        seed: of the initial weights and of the order of the windows.
        rate: the highest learning rate, reached after the warm-up.
        every: steps between two writings. Measuring the loss draws from the same random stream, so another number
            gives slightly other weights.

    Returns: nats per character over the whole validation split, with the weights rounded to float16.
    """
    torch.manual_seed(seed)
    vocabulary = "".join(sorted(set(text)))
    code = {character: token for token, character in enumerate(vocabulary)}
    tokens = torch.tensor([code[character] for character in text])  # [length of the text]
    cut = len(tokens) * 9 // 10
    training, validation = tokens[:cut], tokens[cut:]
    network = Network(shape, len(vocabulary))
    optimiser = torch.optim.AdamW(parameter_groups(network), lr=rate, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: warm_up_then_cosine(step, steps))
    started = time.perf_counter()
    for step in (bar := tqdm(range(1, steps + 1), unit="step", smoothing=0.05)):
        halves = 2 if step < 0.75 * steps else 1  # short windows first: their attention costs half as much
        windows = draw(training, batch * halves, shape["context"] // halves)  # [windows, length + 1]
        loss = cross_entropy(network, windows)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
        if step % every == 0 or step == steps:
            whole, first = evaluate(network, validation, shape)
            bar.write(f"step {step}: training {loss.item():.4f}, validation {whole:.4f} nats per character")
            facts = {
                "steps": step,
                "of_steps": steps,
                "seed": seed,
                "batch": batch,
                "rate": rate,
                "every": every,
            }
            facts["minutes"] = (time.perf_counter() - started) / 60
            losses = {"validation_loss": whole, f"validation_loss_of_first_{FIRST}_windows": first}
            save(network, out, shape, vocabulary, text, facts | losses)
    return whole


def parameter_groups(network: nn.Module) -> list[dict]:
    """Matrices decay, gains do not."""
    parameters = list(network.parameters())
    return [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def warm_up_then_cosine(step: int, steps: int) -> float:
    """The share of the highest rate at a step."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    progress = min(1, (step - WARM_UP) / max(1, steps - WARM_UP))
    return LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def draw(tokens, batch: int, context: int):
    starts = torch.randint(len(tokens) - context, (batch, 1))
    return tokens[starts + torch.arange(context + 1)]  # [batch, context + 1]


def cross_entropy(network, windows, reduction: str = "mean"):  # windows [batch, context + 1]
    logits = network(windows[:, :-1])  # [batch, context, vocabulary]
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(network, tokens, shape: dict) -> tuple[float, float]:
    """Nats per character of the float16 weights, over all tokens and over the first windows.

    The windows lie side by side. A character is predicted from those before it in its window; every character but
    the very first is predicted once.
    """
    stored = Network(shape, network.model.embed_tokens.num_embeddings)
    stored.load_state_dict({name: weight.half().float() for name, weight in network.state_dict().items()})
    context = shape["context"]
    count = (len(tokens) - 1) // context  # windows of full length
    windows = tokens[: count * context + 1].unfold(0, context + 1, context)  # [count, context + 1]
    rest = tokens[count * context :][None]  # [1, at most context]
    pieces = [*windows.split(FIRST), *([rest] if rest.shape[1] > 1 else [])]
    losses = [cross_entropy(stored, piece, "sum").item() for piece in pieces]
    return sum(losses) / (len(tokens) - 1), losses[0] / pieces[0][:, 1:].numel()


# --- what is written ---------------------------------------------------------------------------------------------


def save(network, out: Path, shape: dict, vocabulary: str, text: str, facts: dict) -> None:
    weights = {name: weight.numpy().astype(np.float16) for name, weight in network.state_dict().items()}
    with out.open("wb") as file:
        np.savez_compressed(file, **weights)
    checksum = hashlib.sha256(out.read_bytes()).hexdigest()
    facts = {name: round(fact, 4) for name, fact in facts.items()} | {
        "minutes": round(facts["minutes"], 1),
        "parameters": sum(weight.size for weight in weights.values()),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    description = {"config": shape, "vocabulary": vocabulary, "sha256": checksum, "training": facts}
    out.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    out.with_name("CARD.md").write_text(card(out, shape, vocabulary, facts), encoding="utf-8")


def card(out: Path, shape: dict, vocabulary: str, facts: dict) -> str:
    network = (
        f"Llama decoder: {shape['num_layers']} layers, width {shape['width']}, {shape['num_q_heads']} query and "
        f"{shape['num_kv_heads']} key/value heads of {shape['head_dim']}, SwiGLU {shape['hidden']}, RMSNorm (eps "
        f"{shape['norm_eps']}), RoPE (theta {shape['rope_theta']:g}), no biases, output tied to the embedding; "
        f"{facts['parameters']:,} parameters"
    )
    training = (
        f"{facts['steps']} of {facts['of_steps']} steps of {facts['batch']} windows (cut in two in the first three "
        f"quarters); AdamW (betas 0.9 and 0.99, decay 0.1 on matrices), rate {facts['rate']:g} after {WARM_UP} "
        f"steps, then a cosine to {LOWEST_RATE:.0%}; gradients clipped at norm 1; no dropout; seed {facts['seed']}; "
        f"{facts['minutes']} minutes on the CPU"
    )
    loss = (
        f"**{facts['validation_loss']}** nats per character: the stored float16 weights, computed in float32, over "
        f"the whole validation split in windows of {shape['context']} characters side by side"
    )
    rows = {
        "Use": "teaching: a real decoder, small enough to look at; its text sounds like a play and means nothing",
        "Data": f"{DATA}; sha256 `{facts['text_sha256']}`",
        "Split": "first 90 % training, last 10 % validation",
        "Tokens": f"one per character, {len(vocabulary)} of them",
        "Network": network,
        "Context": f"{shape['context']} characters",
        "Training": training,
        "Validation loss": loss,
        "Licence": "the weights Apache-2.0, as the package; the text is in the public domain",
    }
    table = "".join(f"| {name} | {content} |\n" for name, content in rows.items())
    return (
        f"# {out.name}: a very small Llama that has read Shakespeare\n\n"
        f"Written by `python -m pagedkv.lm.train`; the figures stand in `{out.with_suffix('.json').name}` too.\n\n"
        f"| | |\n|---|---|\n{table}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.lm.train", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="plain text to learn from (UTF-8)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("shakespeare.npz"), metavar="FILE", help="the .npz to write"
    )
    parser.add_argument("--steps", type=int, default=5000, help="optimiser steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="windows in a step (default %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=3e-3, help="highest learning rate (default %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=500, help="steps between two writings (default %(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=SHAPE["context"], help="window length (default %(default)s)"
    )
    options = vars(parser.parse_args(arguments))
    text = options.pop("text").read_text(encoding="utf-8")
    train(text, options.pop("out"), shape=SHAPE | {"context": options.pop("context")}, **options)


if __name__ == "__main__":
    main()
