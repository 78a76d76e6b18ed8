"""Wrong solutions of the capstone, as learners hand them in. See ../test_planted.py."""

import numpy as np

from pagedkv import PoolExhausted

# ---- run(model, pool, names, tokens)


def runs(
    *, copies="first", planned="after", shift=0, one_length=False, written=True, all_rows=False, layers=None
):
    """A run that differs from a right one in what is said."""

    def run(model, pool, names, tokens):
        n = tokens.shape[1]
        early = pool.tables(names), [pool.lengths[name] for name in names]
        room = pool.extend(names, n)
        if copies == "first":
            pool.storage.copy_blocks(room.copies)
        ends = np.array([[pool.lengths[name]] for name in names]) - np.arange(n)[::-1]
        tables = pool.tables(names)
        if planned == "before":
            tables, ends = early[0], np.array([[length] * n for length in early[1]])
        seen = np.broadcast_to(ends[:, -1:], ends.shape) if one_length else ends
        plan = pool.plan(np.repeat(tables, n, axis=0), seen.ravel())

        def attend(layer, q, k, v):
            if written and (layers is None or layer in layers):
                pool.storage.write(layer, room.slots, k, v)
            return plan.run(layer, q, pool.storage)

        positions = np.array([[pool.lengths[name]] for name in names]) - np.arange(n)[::-1] - 1 + shift
        logits = model.decode(tokens.ravel(), positions.ravel(), attend)
        if copies == "last":
            pool.storage.copy_blocks(room.copies)
        return logits if all_rows else logits[n - 1 :: n]

    return run


def swallows_the_refusal(model, pool, names, tokens):
    try:
        return runs()(model, pool, names, tokens)
    except PoolExhausted:
        return np.zeros((len(names), model.config.vocabulary_size), np.float32)


# ---- serve(pool, requests, run)


def serves(
    *,
    side_by_side=True,
    comes_back="tokens",
    reseeded=False,
    sent_home=True,
    victim=-1,
    behind=False,
    one_too_many=False,
    twins_by="tokens",
):
    """A serve that differs from a right one in what is said."""

    def admit(pool, waiting, running, run):
        asked, room = None, pool.num_free
        while waiting and (side_by_side or not running):
            request = waiting[0]
            tokens = request.tokens if comes_back == "tokens" else request.prompt
            same = request.tokens if twins_by == "tokens" else request.prompt
            room -= 1 if same == asked else -(-len(tokens) // pool.block_size)
            if room < 0:
                break
            if same == asked:
                pool.fork(running[-1].name, request.name)
            else:
                pool.add(request.name)
                asked, logits = list(same), run([request.name], np.array([tokens]))
            if reseeded:
                request.stream = np.random.default_rng(request.seed)
            running.append(waiting.popleft())
            request.text.append(request.choose(logits[0]))

    def decode(pool, waiting, running, run):
        while running:
            try:
                return run([r.name for r in running], np.array([r.text[-1:] for r in running]))
            except PoolExhausted:
                request = running.pop(victim)
                pool.free(request.name)
                waiting.append(request) if behind else waiting.appendleft(request)
        return []

    def serve(pool, requests, run):
        waiting, running = requests, []
        while waiting or running:
            ran = len(running)
            for request, row in zip(running, decode(pool, waiting, running, run), strict=True):
                request.text.append(request.choose(row))
            if len(running) == ran:
                admit(pool, waiting, running, run)
            for request in [r for r in running if len(r.text) >= r.new + one_too_many]:
                running.remove(request)
                if sent_home or waiting:
                    pool.free(request.name)

    return serve


def one_stream_for_all(pool, requests, run):
    shared = requests[0].stream
    for request in requests:
        request.stream = shared
    serves()(pool, requests, run)


def nobody_is_answered(pool, requests, run):
    for request in list(requests):
        pool.add(request.name)
        run([request.name], np.array([request.prompt]))
        pool.free(request.name)


BUGS = [
    ("parts_joined", "copies left out", runs(copies=None), "who carries out the copies"),
    ("parts_joined", "copies after the step", runs(copies="last"), "who carries out the copies"),
    (
        "parts_joined",
        "one length for all rows",
        runs(one_length=True),
        "which rows of keys has each of its tokens seen",
    ),
    ("parts_joined", "positions from one", runs(shift=1), "how many tokens stand in front of each new one"),
    ("parts_joined", "first layer only", runs(layers=(0,)), "NaN, which stands in every slot"),
    ("parts_joined", "a row for every token", runs(all_rows=True), "of every row, or of every sequence"),
    ("parts_joined", "the refusal is swallowed", swallows_the_refusal, "who has to hear it"),
    (
        "serve_evening",
        "one after the other",
        serves(side_by_side=False),
        "what does a step cost for one sequence",
    ),
    (
        "serve_evening",
        "comes back with the prompt only",
        serves(comes_back="prompt"),
        "what must be run again",
    ),
    ("serve_evening", "comes back with a new stream", serves(reseeded=True), "what must not be touched"),
    ("serve_evening", "the last ones stay", serves(sent_home=False), "who gives back the blocks"),
    ("serve_evening", "a letter too many", serves(one_too_many=True), "when is a request done"),
    (
        "serve_evening",
        "shares with whoever asked the same once",
        serves(twins_by="prompt"),
        "the same up to letter",
    ),
    ("serve_evening", "one stream for all", one_stream_for_all, "from whose stream came the number"),
    ("serve_evening", "nobody is answered", nobody_is_answered, "when is a request done"),
    ("pool_choice", "blocks of 128", (128, 100), "what are the others waiting for"),
    ("pool_choice", "too small", (16, 700), "what are the others waiting for"),
    ("pool_choice", "tokens for blocks", (16, 12800), "how many bytes has a block"),
    ("pool_choice", "blocks of one", (1, 12800), "the kernel takes 16, 32, 64, 128"),
    ("sealed_fault", "another letter", (4, "b"), "which rule is broken first"),
    ("sealed_fault", "the letter of another pool", (2, "c"), "which rule is broken first"),
    ("sealed_fault", "the letter alone", "c", "a number and a letter"),
    ("sealed_fault", "the sound pool", (0, "c"), "the pools are 1 to 6"),
]
