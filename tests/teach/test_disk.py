"""The disk that loses power: what programs read, what a crash may leave, and what a save must survive."""

import pytest

from pagedkv.teach.disk import Disk


def found(disk, name):
    return disk.crashes(name)[-1][1]


def test_a_program_reads_what_it_wrote():
    disk = Disk({"old": b"1"})
    disk.write("new", b"23")
    disk.rename("new", "old")
    assert (disk.read("old"), disk.names()) == (b"23", ["old"])
    disk.remove("old")
    assert disk.names() == []


def test_written_in_place_anything_may_be_found():
    disk = Disk({"file": b"before"})
    disk.write("file", b"afterwards")
    assert found(disk, "file") == [b"before", b"", b"after", b"afterwards"]
    disk.sync("file")
    assert found(disk, "file") == [b"afterwards"]


def test_a_new_file_may_be_missing_until_its_name_is_safe():
    disk = Disk()
    disk.write("file", b"ab")
    disk.sync("file")
    assert found(disk, "file") == [None, b"ab"]
    disk.sync_folder()
    assert found(disk, "file") == [b"ab"]


def test_a_name_may_be_safe_before_the_bytes():
    disk = Disk({"file": b"old"})
    disk.write("other", b"new!")
    disk.rename("other", "file")
    assert found(disk, "file") == [b"old", b"", b"ne", b"new!"]
    disk.sync_folder()
    assert found(disk, "file") == [b"", b"ne", b"new!"]


def test_names_change_in_order():
    disk = Disk({"a": b"1"})
    disk.rename("a", "b")
    disk.rename("b", "c")
    assert [found(disk, name) for name in "abc"] == [[b"1", None], [None, b"1"], [None, b"1"]]


def test_every_step_is_kept():
    disk = Disk()
    disk.write("file", b"ab")
    assert [what for what, _ in disk.crashes("file")] == [
        "begin",
        "file is empty",
        "half of file is written",
        "file is written",
    ]
    assert disk.crashes("file")[0][1] == [None]


def test_a_full_disk_writes_half_and_says_so():
    disk = Disk({"file": b"12345678"}, room=10)
    with pytest.raises(OSError, match="space"):
        disk.write("other", b"1234")
    assert disk.read("other") == b"12"
    disk.remove("other")
    disk.write("other", b"12")


@pytest.mark.parametrize("call", ["read", "sync", "remove"])
def test_a_file_that_is_not_there(call):
    with pytest.raises(FileNotFoundError):
        getattr(Disk(), call)("file")


def test_renaming_what_is_not_there_or_into_another_folder():
    disk = Disk({"file": b"1"})
    with pytest.raises(FileNotFoundError):
        disk.rename("gone", "file")
    with pytest.raises(OSError, match="another folder"):
        disk.rename("file", "folder/file")
    assert disk.read("file") == b"1"
