"""Readers of request traces: who asked when, how long, and which blocks two prompts have in common.

A trace is read line by line and never held in memory. What it says about shared text becomes *block keys*: two
requests share a block exactly if they have its key, and then everything before that block too.

| format | a line | text in common |
|---|---|---|
| mooncake | JSON: timestamp (ms), input_length, output_length, hash_ids | one id per 512 tokens of the prompt |
| vllm | JSON: request_id, timestamp (s), lengths, hash_ids | one id per full 16 tokens of prompt and answer |
| agentic | JSON: a session with block_size and requests (t, model, in, out, hash_ids) | one id per full block |
| azure | CSV: TIMESTAMP, ContextTokens, GeneratedTokens | not told |
| sharegpt | CSV: num_prefill_tokens, num_decode_tokens; a conversation's turns in order | the turns before |
| lengths | JSON lines or CSV of lengths; timestamp (s), model, hash_ids and block_size if known | as told |

Sources: Mooncake (Qin et al., FAST 2025) and its FAST25 traces; Splitwise (Patel et al., ISCA 2024) and the Azure
LLM inference traces; Sarathi-Serve (Agrawal et al., OSDI 2024) for the lengths of ShareGPT.
"""

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from ..allocator import whole_number

LONGEST_LINE = 64 * 2**20  # bytes; an agent's whole day is less than one
LARGEST = 2**31 - 1  # tokens in a request
FIRST_LINES = 200  # from which the format is told

# What the columns and fields of a file of lengths are called here and there, in lower case.
PROMPT = (
    "input_length",
    "num_prefill_tokens",
    "contexttokens",
    "request tokens",
    "prompt_tokens",
    "prompt",
    "in",
)
OUTPUT = (
    "output_length",
    "num_decode_tokens",
    "generatedtokens",
    "response tokens",
    "output_tokens",
    "output",
    "out",
)
TIME = ("timestamp", "arrival_time", "arrival", "t")


class TraceError(ValueError):
    """A file or a line of it that cannot be understood; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    line: int  # where it stands in the file
    arrival: float | None  # seconds since the first request; None if the trace does not tell
    prompt: int  # tokens
    output: int  # tokens
    ids: Sequence[int] = ()  # one per `id_tokens` tokens from the start of the prompt, prefix-chained
    id_tokens: int = 0  # 0 if the trace tells nothing about shared text
    covered: int = 0  # tokens that `ids` speak for: all or part of the prompt, in some formats the answer too
    scope: int = 0  # ids mean the same within one scope: a model, a conversation
    model: str = ""
    session: str = ""

    def blocks(self, block_size: int) -> list[int]:
        """Keys of its blocks from the first token on, the last one perhaps of a partly filled block.

        Ids of coarser blocks are divided: two prompts that part within an id then seem to part at its start, so
        hits are a lower bound. Ids of finer blocks are joined, which is exact.

        Args: block_size: tokens; a multiple or a divisor of `id_tokens`.
        Raises: ValueError for any other block size.
        """
        if not self.id_tokens:
            return []
        check_block_size(block_size, self.id_tokens)
        if block_size >= self.id_tokens:  # the last id of a block stands for all of it, ids are chained
            joined = block_size // self.id_tokens
            keys = list(self.ids[joined - 1 :: joined])
            if len(self.ids) % joined:
                keys.append(self.ids[-1])
        else:
            parts = self.id_tokens // block_size
            keys = [key * parts + part for key in self.ids for part in range(parts)]
            del keys[-(-self.covered // block_size) :]
        if self.scope:
            above = self.scope << 96  # ids are below 2**63 and are divided into fewer than 2**31 parts
            keys = [above + key for key in keys]
        return keys


def check_block_size(block_size: int, id_tokens: int) -> None:
    """ValueError unless ids that stand for `id_tokens` tokens can be told in blocks of `block_size`."""
    if id_tokens and block_size % id_tokens and id_tokens % block_size:
        raise ValueError(
            f"the trace's ids stand for {id_tokens} tokens each: a block size must divide {id_tokens} "
            f"or be a multiple of it, not {block_size}"
        )


class Trace:
    """The requests of a file (plain or gzip), read anew by each iteration.

    Args: path; format: a name of FORMATS, None tells it from the first lines; skip_bad: leave damaged lines out and
        count them; limit: requests to read; id_tokens: tokens per hash id where the lines do not tell.
    Raises: TraceError for a file whose format cannot be told, and while reading for a damaged line; OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        format: str | None = None,
        *,
        skip_bad: bool = False,
        limit: int | None = None,
        id_tokens: int | None = None,
    ):
        if format is not None and format not in FORMATS:
            raise ValueError(f"the format must be one of {', '.join(FORMATS)}, not {format!r}")
        self.path, self.skip_bad, self.limit = Path(path), skip_bad, limit
        self.id_tokens = id_tokens if id_tokens is None else whole_number("id_tokens", id_tokens, minimum=1)
        self.size = self.path.stat().st_size  # bytes
        self.position = 0  # bytes read by the running iteration
        self.skipped, self.first_skipped = 0, ""  # damaged lines of the last iteration
        self.format = format or self._told_format()

    def __iter__(self) -> Iterator[TraceRequest]:
        self.position, self.skipped, self.first_skipped = 0, 0, ""
        reader, given = None, 0
        for number, line in self._lines():
            if given == self.limit:
                return
            if reader is None:
                reader = self._reader(number, line)
                if reader.fields:
                    continue  # the header of a CSV
            try:
                requests = reader.requests(number, line)
            except (ValueError, RecursionError) as error:
                self._damaged(number, error)
                continue
            for request in requests:
                if given == self.limit:
                    return
                given += 1
                yield request

    def _damaged(self, number: int, error: Exception) -> None:
        message = f"{self.path.name}, line {number}: {error}"
        if not self.skip_bad:
            raise TraceError(message) from None
        self.skipped += 1
        self.first_skipped = self.first_skipped or message

    def _reader(self, number: int, line: bytes) -> "Lines":
        try:
            return FORMATS[self.format](line, self.id_tokens)
        except ValueError as error:  # without its header nothing in a CSV means anything
            raise TraceError(f"{self.path.name}, line {number}: {error}") from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each line that is not blank, without its end and without a byte order mark."""
        number = 0
        with open(self.path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
            try:
                while line := file.readline(LONGEST_LINE):
                    number += 1
                    if len(line) == LONGEST_LINE:
                        raise TraceError(f"{self.path.name}, line {number}: over {LONGEST_LINE} bytes long")
                    self.position = raw.tell()
                    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                    if line := line.strip():
                        yield number, line
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise TraceError(f"{self.path.name}: damaged after line {number}: {error}") from None

    def _told_format(self) -> str:
        head = []
        for _, line in self._lines():
            head.append(line)
            if len(head) == FIRST_LINES:
                break
        if not head:
            return "lengths"  # an empty file has no requests in any format
        try:
            return _told_by_json(head) if head[0][:1] in b"{[" else _told_by_header(head)
        except ValueError as error:
            raise TraceError(f"{self.path.name}: {error}; give its format") from None


def _told_by_json(head: Sequence[bytes]) -> str:
    for line in head:
        try:
            record = _json_object(line)
        except (ValueError, RecursionError):
            continue  # whether damaged lines are accepted is decided when they are read
        if "requests" in record:
            return "agentic"
        if "hash_ids" in record and "request_id" in record:
            return "vllm"
        if {"timestamp", "hash_ids"} <= record.keys() and not {"block_size", "chat_id"} & record.keys():
            return "mooncake"
        return "lengths"
    raise ValueError("none of the first lines is a JSON object")


def _told_by_header(head: Sequence[bytes]) -> str:
    fields = {field.lower() for field in _csv_fields(head[0])}
    if {"timestamp", "contexttokens", "generatedtokens"} <= fields:
        return "azure"
    if not {"num_prefill_tokens", "num_decode_tokens"} <= fields:
        return "lengths"
    # Independent rows look like the next turn of a conversation less than half the time.
    reader, turns, goes_on = ShareGPT(head[0], None), 0, 0
    for line in head[1:]:
        try:
            before = reader.scope
            reader.requests(0, line)
        except ValueError:
            continue
        turns, goes_on = turns + 1, goes_on + (reader.scope == before)
    return "sharegpt" if goes_on > turns / 2 else "lengths"


# ---- one class per format: lines in, requests out -----------------------------------------------------------


class Lines:
    """Turns lines into requests. A line that raises ValueError leaves it as it was.

    Args: first: the file's first line, a CSV's header; id_tokens: tokens per hash id, None if not told.
    """

    fields: Sequence[str] = ()  # of a CSV, in lower case
    milliseconds = False
    default_id_tokens = 0

    def __init__(self, first: bytes, id_tokens: int | None):
        self.id_tokens = id_tokens or self.default_id_tokens
        self.scopes: dict[object, int] = {"": 0}  # model, or session and model -> number
        self.start: float | None = None
        self.now = -inf

    def requests(self, number: int, line: bytes) -> Sequence[TraceRequest]:
        return [self.request(number, _json_object(line))]

    def request(self, number: int, record: Mapping) -> TraceRequest:
        """The request that a record of named values tells."""
        prompt, output = _count(record, PROMPT), _count(record, OUTPUT)
        model = _text(record, "model")
        id_tokens, ids, covered = self.told_ids(record, prompt, output)
        arrival = self.arrival(record)
        scope = self.scopes.setdefault(model, len(self.scopes))
        return TraceRequest(number, arrival, prompt, output, ids, id_tokens, covered, scope, model)

    def told_ids(self, record: Mapping, prompt: int, output: int) -> tuple[int, Sequence[int], int]:
        """Tokens per id, the ids, and the tokens that they cover."""
        ids, size = _ids(record), self.id_tokens
        expected = -(-prompt // size)
        if len(ids) != expected:
            raise ValueError(f"{prompt} tokens need {expected} hash_ids of {size} tokens, not {len(ids)}")
        return size, ids, prompt

    def arrival(self, record: Mapping) -> float | None:
        """Seconds since the first request; ValueError if the time goes back. Call it when all else is right."""
        value = _named(record, TIME)
        if value is None:
            if self.start is not None:
                raise ValueError("the timestamp is missing")
            return None
        now = _seconds(value) / (1000 if self.milliseconds else 1)
        if now < self.now:
            raise ValueError(f"the timestamp goes back: {value!r}")
        self.start, self.now = now if self.start is None else self.start, now
        return now - self.start


class Mooncake(Lines):
    """Mooncake's traces: milliseconds, one id per 512 tokens of the prompt, the last one mostly partial."""

    milliseconds = True
    default_id_tokens = 512


class VLLM(Lines):
    """A run of vLLM: one id per full 16 tokens of prompt and answer together."""

    default_id_tokens = 16

    def told_ids(self, record: Mapping, prompt: int, output: int) -> tuple[int, Sequence[int], int]:
        ids, size = _ids(record), self.id_tokens
        expected = (prompt + output) // size
        if len(ids) != expected:
            raise ValueError(
                f"{prompt} + {output} tokens fill {expected} blocks of {size}, not {len(ids)} hash_ids"
            )
        return size, ids, expected * size


class Lengths(Lines):
    """Lengths, and whatever else is told under the names that traces use: JSON lines, or a CSV with a header."""

    def __init__(self, first: bytes, id_tokens: int | None):
        super().__init__(first, id_tokens)
        if first[:1] not in b"{[":
            self.fields = [field.lower() for field in _csv_fields(first)]
            for names in (PROMPT, OUTPUT):
                if not set(names) & set(self.fields):
                    raise ValueError(f"no column is called {' or '.join(names)}: {', '.join(self.fields)}")

    def requests(self, number: int, line: bytes) -> Sequence[TraceRequest]:
        if not self.fields:
            return super().requests(number, line)
        values = _csv_fields(line)
        if len(values) != len(self.fields):
            raise ValueError(f"{len(values)} values for the {len(self.fields)} columns of the header")
        return [self.request(number, dict(zip(self.fields, values, strict=True)))]

    def told_ids(self, record: Mapping, prompt: int, output: int) -> tuple[int, Sequence[int], int]:
        if record.get("hash_ids") is None:
            return 0, (), 0
        size = _count(record, ("block_size",)) if "block_size" in record else self.id_tokens
        if not size:
            raise ValueError(
                "how many tokens does a hash id stand for? (block_size in the line, or an option)"
            )
        ids = _ids(record)
        if len(ids) not in (prompt // size, -(-prompt // size)):
            raise ValueError(f"{len(ids)} hash_ids of {size} tokens do not fit {prompt} tokens")
        return size, ids, min(prompt, len(ids) * size)


class Azure(Lengths):
    """Azure's traces: times of day with seven digits behind the second, and two lengths."""


class ShareGPT(Lengths):
    """Turns of conversations: a prompt repeats the turns before it, or a new conversation begins.

    A position in a conversation is all that its text depends on, so every token has an id of its own.
    """

    def __init__(self, first: bytes, id_tokens: int | None):
        super().__init__(first, id_tokens)
        self.scope, self.held = 0, inf  # the conversation, and its tokens so far

    def request(self, number: int, record: Mapping) -> TraceRequest:
        prompt, output = _count(record, PROMPT), _count(record, OUTPUT)
        arrival = self.arrival(record)
        self.scope += prompt < self.held
        self.held = prompt + output
        ids = range(self.held)
        return TraceRequest(
            number, arrival, prompt, output, ids, 1, self.held, self.scope, "", str(self.scope)
        )


class Agentic(Lines):
    """Sessions of coding agents, one a line, with several models; sessions follow one another.

    Ids mean something within one session and one model only.
    """

    def requests(self, number: int, line: bytes) -> Sequence[TraceRequest]:
        session = _json_object(line)
        size = _count(session, ("block_size",))
        name, records = _text(session, "trace") or str(number), session.get("requests")
        if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
            raise ValueError("requests must be a list of objects")
        begins, found, scopes = max(self.now, 0.0), [], {}
        times = Lines(b"", None)  # of this session
        for place, record in enumerate(records, start=1):
            try:
                prompt, output, ids = _count(record, PROMPT), _count(record, OUTPUT), _ids(record)
                if len(ids) != prompt // size:
                    raise ValueError(
                        f"{prompt} tokens fill {prompt // size} blocks of {size}, not {len(ids)}"
                    )
                arrival = begins + (times.arrival(record) or 0.0)
            except ValueError as error:
                raise ValueError(f"request {place} of {name}: {error}") from None
            model = _text(record, "model")
            scope = len(self.scopes) + scopes.setdefault(model, len(scopes))
            about = (ids, size, len(ids) * size, scope, model, name)
            found.append(TraceRequest(number, arrival, prompt, output, *about))
        self.scopes |= {(number, model): len(self.scopes) + i for model, i in scopes.items()}
        self.now = found[-1].arrival if found else self.now
        return found


FORMATS = {
    "mooncake": Mooncake,
    "azure": Azure,
    "sharegpt": ShareGPT,
    "vllm": VLLM,
    "agentic": Agentic,
    "lengths": Lengths,
}


# ---- values ---------------------------------------------------------------------------------------------------


def _json_object(line: bytes) -> dict:
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, not {line[:40].decode('utf-8')!r}")
    return record


def _csv_fields(line: bytes) -> list[str]:
    try:
        return [field.strip() for field in next(csv.reader([line.decode("utf-8")], strict=True))]
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _named(record: Mapping, names: Sequence[str]) -> object:
    """The value under the first of some names that the record has; None if it has none of them."""
    for name in names:
        if name in record:
            return record[name]
    return None


def _count(record: Mapping, names: Sequence[str]) -> int:
    """A number of tokens, at least 1. CSV files write some as "74.0"."""
    value = _named(record, names)
    try:
        number = float(value) if isinstance(value, str) else value
        whole = not isinstance(number, bool) and 1 <= number <= LARGEST and number == int(number)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        name = next((name for name in names if name in record), names[0])
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(number)


def _seconds(value: object) -> float:
    """A point in time: a number, or a date and time of day."""
    try:
        if isinstance(value, str) and "-" in value.lstrip("-"):
            when = datetime.fromisoformat(value)  # digits behind a millionth of a second are dropped
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = inf
    if isinstance(value, bool) or not -inf < number < inf:
        raise ValueError(f"the timestamp must be a number or a date and time, got {value!r}")
    return number


def _text(record: Mapping, name: str) -> str:
    value = record.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r}")
    return value


def _ids(record: Mapping) -> Sequence[int]:
    """The hash ids: different whole numbers; each stands for a block and all before it, so none comes twice."""
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(key) is int and 0 <= key < 2**63 for key in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    if len(set(ids)) < len(ids):
        raise ValueError("hash_ids names a block twice")
    return ids
