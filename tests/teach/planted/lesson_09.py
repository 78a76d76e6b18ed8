"""Wrong solutions of lesson 09, as learners write them. See ../test_planted.py."""

import struct
import zlib

from pagedkv.teach import story
from pagedkv.teach.checks._core import ERROR

# ---- check_page(record, key, page_bytes)


def checksum_of_the_page_only(record, key, page_bytes):
    if len(record) != 12 + page_bytes:
        return False
    return int.from_bytes(record[:4], "little") == zlib.crc32(record[12:]) and record[4:12] == key


def key_not_compared(record, key, page_bytes):
    return len(record) == 12 + page_bytes and int.from_bytes(record[:4], "little") == zlib.crc32(record[4:])


def number_only(record, key, page_bytes):
    return key_not_compared(record, key, page_bytes) and record[11] == key[7]


def length_not_checked(record, key, page_bytes):
    return int.from_bytes(record[:4], "little") == zlib.crc32(record[4:]) and record[4:12] == key


def unpacks_at_once(record, key, page_bytes):
    crc, found, page = struct.unpack(f"<I8s{page_bytes}s", record)
    return crc == zlib.crc32(found + page) and found == key


def checksum_not_compared(record, key, page_bytes):
    return len(record) == 12 + page_bytes and record[4:12] == key


def expected_key_only(record, key, page_bytes):
    return (
        int.from_bytes(record[:4], "little") == zlib.crc32(key + record[12:])
        and len(record) == 12 + page_bytes
    )


# ---- survivors(tables, lengths, bad, block_size)


def damaged_pages_subtracted(tables, lengths, bad, block_size):
    return {
        name: max(0, lengths[name] - block_size * sum(block in bad for block in table))
        for name, table in tables.items()
    }


def all_or_nothing(tables, lengths, bad, block_size):
    return {name: 0 if set(table) & set(bad) else lengths[name] for name, table in tables.items()}


def place_is_the_id(tables, lengths, bad, block_size):
    return {
        name: min([lengths[name], *(block * block_size for block in table if block in bad)])
        for name, table in tables.items()
    }


def first_owner_pays(tables, lengths, bad, block_size):
    left, bad = {}, list(bad)
    for name, table in tables.items():
        hit = [place for place, block in enumerate(table) if block in bad]
        left[name] = hit[0] * block_size if hit else lengths[name]
        bad = [block for block in bad if block not in table]
    return left


def last_damage_counts(tables, lengths, bad, block_size):
    left = {}
    for name, table in tables.items():
        hit = [place for place, block in enumerate(table) if block in bad]
        left[name] = hit[-1] * block_size if hit else lengths[name]
    return left


def lengths_rounded(tables, lengths, bad, block_size):
    left = {}
    for name, table in tables.items():
        good = 0
        while good < len(table) and table[good] not in bad:
            good += 1
        left[name] = good * block_size
    return left


def the_page_too(tables, lengths, bad, block_size):
    left = {}
    for name, table in tables.items():
        hit = [place for place, block in enumerate(table) if block in bad]
        left[name] = min((hit[0] + 1) * block_size - 1, lengths[name]) if hit else lengths[name]
    return left


def ask_the_story(tables, lengths, bad, block_size):
    return story.tokens_left(story.at_the_wall(), *bad)


# ---- save_atomically(disk, name, data)

SAVES = iter(range(10**9))


def saver(*, sync=True, folder=True, clean=True, place="", fixed=False, remove_first=False, quiet=False):
    """A save that differs from a right one in what is said."""

    def save(disk, name, data):
        temporary = f"{place}{name}.tmp" + ("" if fixed else str(next(SAVES)))
        try:
            disk.write(temporary, data)
            if sync:
                disk.sync(temporary)
            if remove_first and name in disk.names():
                disk.remove(name)
            disk.rename(temporary, name)
        except OSError:
            if clean and temporary in disk.names():
                disk.remove(temporary)
            if not quiet:
                raise
        if folder:
            disk.sync_folder()

    return save


def in_place(disk, name, data):
    disk.write(name, data)
    disk.sync(name)
    disk.sync_folder()


def backup_first(disk, name, data):
    if name in disk.names():
        disk.rename(name, name + ".bak")
    disk.write(name, data)
    disk.sync(name)
    disk.sync_folder()


def synced_afterwards(disk, name, data):
    temporary = f"{name}.{next(SAVES)}"
    disk.write(temporary, data)
    disk.rename(temporary, name)
    disk.sync(name)
    disk.sync_folder()


BUGS = [
    ("who_keeps", "place is the id", ((8, 13, 13), (13, 8, 8), (4, 4, 4)), "at which place of the table"),
    ("who_keeps", "one owner pays", ((12, 13, 13), (13, 8, 8), (4, 13, 13)), "is there a damaged page in it"),
    ("who_keeps", "the hole is small", ((12, 13, 13), (13, 9, 9), (4, 4, 4)), "a text with a hole in it"),
    ("who_keeps", "all of it lost", ((12, 13, 13), (13, 0, 0), (4, 4, 4)), "who needs it no more"),
    ("who_keeps", "the last damage", ((12, 13, 13), (13, 8, 8), (4, 12, 4)), "comes first in the text"),
    ("who_keeps", "one row", (12, 13, 13), "three rows of three"),
    (
        "check_page",
        "checksum of the page only",
        checksum_of_the_page_only,
        "which bytes does the checksum cover",
    ),
    ("check_page", "key not compared", key_not_compared, "whose letters do you hand out"),
    ("check_page", "number only", number_only, "what else does the key say"),
    ("check_page", "length not checked", length_not_checked, "how long must a record be"),
    ("check_page", "unpacks at once", unpacks_at_once, "may damage stop the whole load"),
    ("check_page", "checksum not compared", checksum_not_compared, "when the checksum is damaged"),
    ("check_page", "stored key not read", expected_key_only, "when the key is damaged"),
    ("survivors", "damaged pages subtracted", damaged_pages_subtracted, "who can go on behind a hole"),
    ("survivors", "all or nothing", all_or_nothing, "who has page 1 in their table"),
    ("survivors", "place is the id", place_is_the_id, "at which place"),
    ("survivors", "first owner pays", first_owner_pays, "who has page 1 in their table"),
    ("survivors", "last damage counts", last_damage_counts, "which damaged page comes first"),
    ("survivors", "lengths rounded", lengths_rounded, "how many tokens do they have"),
    ("survivors", "part of the page too", the_page_too, "who can go on behind a hole"),
    ("survivors", "the story's", ask_the_story, "calls the package's tokens_left"),
    ("save_atomically", "in place", in_place, "under which name may half a file lie"),
    ("save_atomically", "no sync", saver(sync=False), "have the bytes"),
    ("save_atomically", "synced afterwards", synced_afterwards, "have the bytes"),
    ("save_atomically", "name not synced", saver(folder=False), "is their name"),
    ("save_atomically", "old one removed first", saver(remove_first=True), "neither the old nor the new"),
    ("save_atomically", "one temporary name", saver(fixed=True), "another process saves at the same moment"),
    ("save_atomically", "half a file left", saver(clean=False), "who cleans up half a file"),
    ("save_atomically", "in another folder", saver(place="tmp/"), "another folder", ERROR),
    ("temporary_line", "the rename", 10, "who took it"),
    ("temporary_line", "the write", 6, "whose file is it"),
    ("temporary_line", "the look", 3, "what would a second one add"),
    ("temporary_line", "no line", 12, "1 to 11"),
]
