"""Wrong solutions of lesson 07's exercises, and what its checks must say to them."""

from hashlib import sha256

import numpy as np


def as_bytes(block):
    return np.array(block, "<i8").tobytes()


def root(salt):
    return sha256(b"root " + salt.encode()).digest()


def blocks(tokens, size):
    return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]


# ---- block_keys


def no_parent(tokens, block_size, salt=""):
    return [sha256(root(salt) + as_bytes(block)).digest() for block in blocks(tokens, block_size)]


def pythons_hash(tokens, block_size, salt=""):
    key, keys = hash(salt), []
    for block in blocks(tokens, block_size):
        key = hash((key, tuple(block)))
        keys.append(sha256(b"%d" % key).digest())
    return keys


def numbers_as_keys(tokens, block_size, salt=""):
    key, keys = hash(salt), []
    for block in blocks(tokens, block_size):
        key = hash((key, tuple(block)))
        keys.append(key)
    return keys


def joined_without_lengths(tokens, block_size, salt=""):
    key, keys = root(salt), []
    for block in blocks(tokens, block_size):
        key = sha256(key + "".join(map(str, block)).encode()).digest()
        keys.append(key)
    return keys


def tail_too(tokens, block_size, salt=""):
    key, keys = root(salt), []
    for start in range(0, len(tokens), block_size):
        key = sha256(key + as_bytes(tokens[start : start + block_size])).digest()
        keys.append(key)
    return keys


def root_too(tokens, block_size, salt=""):
    keys = [root(salt)]
    for block in blocks(tokens, block_size):
        keys.append(sha256(keys[-1] + as_bytes(block)).digest())
    return keys


def one_byte_a_token(tokens, block_size, salt=""):
    key, keys = root(salt), []
    for block in blocks(tokens, block_size):
        key = sha256(key + bytes(token % 256 for token in block)).digest()
        keys.append(key)
    return keys


def salt_in_the_first_key_only(tokens, block_size, salt=""):
    keys = chain_without_salt(tokens, block_size)
    return [sha256(keys[0] + salt.encode()).digest(), *keys[1:]] if keys else []


def chain_without_salt(tokens, block_size, salt=""):
    key, keys = root(""), []
    for block in blocks(tokens, block_size):
        key = sha256(key + as_bytes(block)).digest()
        keys.append(key)
    return keys


# ---- hit


def all_of_it(keys, known, length, block_size):
    found = []
    for key in keys:
        if key not in known:
            break
        found.append(known[key])
    return found


def over_the_gap(keys, known, length, block_size):
    return [known[key] for key in keys[: max(length - 1, 0) // block_size] if key in known]


def always_one_less(keys, known, length, block_size):
    return all_of_it(keys, known, length, block_size)[: max(length // block_size - 1, 0)]


def block_0_is_nothing(keys, known, length, block_size):
    found = []
    for key in keys[: max(length - 1, 0) // block_size]:
        if not known.get(key):
            break
        found.append(known[key])
    return found


# ---- revive


def still_free(pool, found):
    for block in found:
        pool.owners[block] += 1


def key_dropped(pool, found):
    for block in found:
        if pool.owners[block] == 0:
            pool.free.remove(block)
            del pool.block_of[pool.key_of.pop(block)]
        pool.owners[block] += 1


def count_set_to_one(pool, found):
    for block in found:
        if block in pool.free:
            pool.free.remove(block)
        pool.owners[block] = 1


def always_from_the_list(pool, found):
    for block in found:
        pool.free.remove(block)
        pool.owners[block] += 1


def from_the_front(pool, found):
    for block in found:
        if pool.owners[block] == 0:
            pool.free.pop(0)
        pool.owners[block] += 1


# ---- give_back


def head_first(pool, table):
    plain = []
    for block in table:
        pool.owners[block] -= 1
        if pool.owners[block] == 0:
            (pool.free if block in pool.key_of else plain).append(block)
    pool.free[:0] = plain[::-1]


def all_to_the_front(pool, table):
    freed = []
    for block in reversed(table):
        pool.owners[block] -= 1
        if pool.owners[block] == 0:
            freed.append(block)
    pool.free[:0] = freed


def all_to_the_back(pool, table):
    for block in reversed(table):
        pool.owners[block] -= 1
        if pool.owners[block] == 0:
            pool.free.append(block)


def newest_text_first(pool, table):
    plain, keyed = [], []
    for block in reversed(table):
        pool.owners[block] -= 1
        if pool.owners[block] == 0:
            (keyed if block in pool.key_of else plain).append(block)
    others = [block for block in pool.free if block not in pool.key_of]
    pool.free[:] = plain + others + keyed + [block for block in pool.free if block in pool.key_of]


def one_by_one_to_the_front(pool, table):
    for block in reversed(table):
        pool.owners[block] -= 1
        if pool.owners[block] == 0 and block in pool.key_of:
            pool.free.append(block)
        elif pool.owners[block] == 0:
            pool.free.insert(0, block)


def shared_ones_too(pool, table):
    plain = []
    for block in reversed(table):
        pool.owners[block] -= 1
        (pool.free if block in pool.key_of else plain).append(block)
    pool.free[:0] = plain


def forgets_the_text(pool, table):
    plain = []
    for block in reversed(table):
        pool.owners[block] -= 1
        if pool.owners[block] == 0:
            (pool.free if block in pool.key_of else plain).append(block)
            pool.block_of.pop(pool.key_of.pop(block, None), None)
    pool.free[:0] = plain


BUGS = [
    ("block_keys", "parent left out", no_parent, "what does the model know at each of them"),
    ("block_keys", "Python's hash", pythons_hash, "is there another hash"),
    ("block_keys", "numbers as keys", numbers_as_keys, "expected a digest"),
    ("block_keys", "joined without lengths", joined_without_lengths, "where does a token end"),
    ("block_keys", "tail hashed", tail_too, "which of its blocks will never change any more"),
    ("block_keys", "root among the keys", root_too, "what stands before the first block"),
    ("block_keys", "one byte a token", one_byte_a_token, "have the same key"),
    ("block_keys", "salt in the first key only", salt_in_the_first_key_only, "blocks [1, 2, 3, 4] are equal"),
    ("hit", "all of it", all_of_it, "what does the model run to say the ninth"),
    ("hit", "goes on after a miss", over_the_gap, "whose place would be empty"),
    ("hit", "always one block less", always_one_less, "expected [0, 1]"),
    ("hit", "block 0 is nothing", block_0_is_nothing, "expected [0, 1]"),
    ("revive", "still in the free queue", still_free, "who gets the front of this queue next"),
    ("revive", "key dropped", key_dropped, "will the next one who brings this prompt find it"),
    ("revive", "count set to one", count_set_to_one, "how many read each of these blocks now"),
    ("revive", "always taken from the list", always_from_the_list, "raised ValueError", "error in your code"),
    ("revive", "taken from the front", from_the_front, "what was nobody's before"),
    ("give_back", "head first", head_first, "which one can be spared"),
    ("give_back", "all to the front", all_to_the_front, "who should be taken first"),
    ("give_back", "all to the back", all_to_the_back, "in front of which others"),
    ("give_back", "newest text first", newest_text_first, "Where do those with a key stand"),
    ("give_back", "one by one to the front", one_by_one_to_the_front, "as one group"),
    ("give_back", "shared ones too", shared_ones_too, "who still reads them"),
    ("give_back", "the text is forgotten", forgets_the_text, "must its text be forgotten"),
    ("next_evicted", "all of Good day", (8, 8, 1), "which token does the model run"),
    ("next_evicted", "letter by letter", (9, 4, 1), "in which unit"),
    ("next_evicted", "only what is in use", (4, 4, 1), "one behind the other"),
    ("next_evicted", "a plain block", (8, 4, 6), "a text in it that can be found"),
    ("next_evicted", "the last in the list", (8, 4, 3), "which one became free first"),
    ("next_evicted", "a block in use", (8, 4, 0), "that somebody reads"),
    ("next_evicted", "two numbers", (8, 4), "it takes three numbers"),
    ("stale_line", "the search", 4, "who should have told it"),
    ("stale_line", "the count", 7, "what does it still promise"),
    ("stale_line", "the entry", 12, "when does it stop being true"),
    ("stale_line", "no line", "take", "the number of one line"),
]
