"""Wrong solutions of lesson 01, as learners write them. See ../test_planted.py."""

# ---- kv_bytes_per_token(layers, kv_heads, head_dim, itemsize)


def keys_only(layers, kv_heads, head_dim, itemsize):
    return layers * kv_heads * head_dim * itemsize


def all_query_heads(layers, kv_heads, head_dim, itemsize):
    return 2 * layers * (4 * kv_heads) * head_dim * itemsize


def one_layer(layers, kv_heads, head_dim, itemsize):
    return 2 * kv_heads * head_dim * itemsize


def one_head(layers, kv_heads, head_dim, itemsize):
    return 2 * layers * head_dim * itemsize


def numbers_not_bytes(layers, kv_heads, head_dim, itemsize):
    return 2 * layers * kv_heads * head_dim


def always_float16(layers, kv_heads, head_dim, itemsize):
    return 2 * layers * kv_heads * head_dim * 2


# ---- waste(prompt, now, final, maximum)


def swapped(prompt, now, final, maximum):
    return now, maximum - final, final - now


def final_for_now(prompt, now, final, maximum):
    return final, 0, maximum - final


def prompt_left_out(prompt, now, final, maximum):
    return now - prompt, final - now, maximum - final


def prompt_twice(prompt, now, final, maximum):
    return prompt + now, final - now, maximum - final


def all_that_is_empty(prompt, now, final, maximum):
    return now, maximum - now, maximum - final


def only_the_waste(prompt, now, final, maximum):
    return final - now, maximum - final


# ---- fits(lengths, slots, maximum, bs)


def reserving(lengths, slots, maximum):
    return min(len(lengths), slots // maximum)


def packed(needs, room):
    """How many of `needs`, in order, find room."""
    admitted = 0
    for need in needs:
        if need > room:
            break
        room -= need
        admitted += 1
    return admitted


def ceil_of_the_sum(lengths, slots, maximum, bs):
    admitted = 0
    while admitted < len(lengths) and -(-sum(lengths[: admitted + 1]) // bs) <= slots // bs:
        admitted += 1
    return reserving(lengths, slots, maximum), admitted


def floor_plus_one(lengths, slots, maximum, bs):
    return reserving(lengths, slots, maximum), packed([n // bs + 1 for n in lengths], slots // bs)


def floor(lengths, slots, maximum, bs):
    return reserving(lengths, slots, maximum), packed([n // bs for n in lengths], slots // bs)


def half_a_block_counts(lengths, slots, maximum, bs):
    return reserving(lengths, slots, maximum), packed([-(-n // bs) for n in lengths], -(-slots // bs))


def jumps_the_queue(lengths, slots, maximum, bs):
    free, admitted = slots // bs, 0
    for length in lengths:
        if -(-length // bs) <= free:
            free -= -(-length // bs)
            admitted += 1
    return reserving(lengths, slots, maximum), admitted


def more_than_came(lengths, slots, maximum, bs):
    return slots // maximum, packed([-(-n // bs) for n in lengths], slots // bs)


def reserves_what_it_needs(lengths, slots, maximum, bs):
    return packed(lengths, slots), packed([-(-n // bs) for n in lengths], slots // bs)


def empties_the_list(lengths, slots, maximum, bs):
    free, admitted = slots // bs, 0
    reserved = reserving(lengths, slots, maximum)
    while lengths and -(-lengths[0] // bs) <= free:
        free -= -(-lengths.pop(0) // bs)
        admitted += 1
    return reserved, admitted


BUGS = [
    ("kv_bytes_per_token", "keys only", keys_only, "gave 65536, expected 131072: a factor is missing."),
    (
        "kv_bytes_per_token",
        "all query heads",
        all_query_heads,
        "gave 524288, expected 131072: that is too much.",
    ),
    ("kv_bytes_per_token", "one layer", one_layer, "how many layers does a token pass"),
    ("kv_bytes_per_token", "one head", one_head, "how many KV heads keep a row"),
    (
        "kv_bytes_per_token",
        "numbers, not bytes",
        numbers_not_bytes,
        "how many bytes does one of these numbers take",
    ),
    ("kv_bytes_per_token", "always float16", always_float16, "(the course's model, float32)"),
    ("waste", "reserved and internal swapped", swapped, "which of the two will this request still write to"),
    ("waste", "final taken for now", final_for_now, "how many tokens exist at this moment?"),
    ("waste", "the prompt left out", prompt_left_out, "do the prompt's tokens need keys and values as well?"),
    ("waste", "the prompt counted twice", prompt_twice, "from where does `now` count?"),
    (
        "waste",
        "reserved is all that is empty",
        all_that_is_empty,
        "the three add up to 22, the request holds 16",
    ),
    ("waste", "only the waste", only_the_waste, "it takes three numbers"),
    ("fits", "ceil of the sum", ceil_of_the_sum, "may two requests put tokens in one block?"),
    ("fits", "floor + 1", floor_plus_one, "how many blocks does a text of 8 tokens fill?"),
    ("fits", "floor", floor, "(four short ones)"),
    ("fits", "half a block counts", half_a_block_counts, "is half a block at the end a block?"),
    ("fits", "jumps the queue", jumps_the_queue, "may a later one go first?"),
    ("fits", "more than came", more_than_came, "can more requests be in than there are?"),
    (
        "fits",
        "reserves what it needs",
        reserves_what_it_needs,
        "does it matter how long a request really is?",
    ),
    ("fits", "empties the list", empties_the_list, "changed its arguments"),
]
