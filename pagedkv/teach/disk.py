"""A disk to pull the plug on: after every step of a program, what may its files hold when the power comes back?

What a program writes stands in memory first. Bytes are surely on the disk after `sync`, names after `sync_folder`;
until then both may be there or not. So a crash here is no matter of luck: `crashes` lists all that may be found.
"""

import errno
import os
from collections.abc import Mapping

Found = bytes | None  # None: there is no such file


class Disk:
    """One folder of files, by name.

    A file is written in two halves, and names change in the order in which they were changed. (Simplified: a real
    disk may tear a file anywhere.)

    Args: files: what lies there safely at the beginning; room: bytes in all, None: enough.
    """

    def __init__(self, files: Mapping[str, bytes] | None = None, room: int | None = None):
        self.room = room
        self._found: list[list[bytes]] = []  # per file: what may be found, last what programs read
        self._folders: list[dict[str, int]] = [{}]  # name -> file: surely there, and after each change since
        self.steps: list[tuple[str, dict[str, list[Found]]]] = []  # what was done, and what may be found then
        for name, data in (files or {}).items():
            self._folders[0][name] = len(self._found)
            self._found.append([bytes(data)])
        self._did("begin")

    # What a program can do

    def names(self) -> list[str]:
        """The files that are there."""
        return list(self._folders[-1])

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        return self._found[self._file(name)][-1]

    def write(self, name: str, data: bytes) -> None:
        """Empty a file, or make it, then fill it. OSError if the disk is full: then half of it is written."""
        if name not in self._folders[-1]:
            self._changed({**self._folders[-1], name: len(self._found)})
            self._found.append([])
        self._holds(name, b"", f"{name} is empty")
        self._holds(name, data[: len(data) // 2], f"half of {name} is written")
        used = sum(len(self._found[file][-1]) for file in set(self._folders[-1].values()))
        if self.room is not None and used + len(data) - len(data) // 2 > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        self._holds(name, data, f"{name} is written")

    def sync(self, name: str) -> None:
        """Wait until a file's bytes are on the disk."""
        file = self._file(name)
        self._found[file] = self._found[file][-1:]
        self._did(f"{name} is synced")

    def rename(self, old: str, new: str) -> None:
        """Give a file another name; what had that name is gone. OSError for a name in another folder."""
        file = self._file(old)
        if os.path.dirname(old) != os.path.dirname(new):
            raise OSError(errno.EXDEV, "another folder may be on another disk", old, None, new)
        self._changed({**{n: f for n, f in self._folders[-1].items() if n != old}, new: file})
        self._did(f"{old} is called {new}")

    def remove(self, name: str) -> None:
        """Forget a file."""
        self._file(name)
        self._changed({n: f for n, f in self._folders[-1].items() if n != name})
        self._did(f"{name} is removed")

    def sync_folder(self) -> None:
        """Wait until the names are on the disk."""
        self._folders = self._folders[-1:]
        self._did("the folder is synced")

    # What a crash leaves

    def crashes(self, name: str) -> list[tuple[str, list[Found]]]:
        """After every step: what was done, and all that may be found under a name if the power fails there."""
        return [(what, found.get(name, [None])) for what, found in self.steps]

    def __repr__(self) -> str:
        return "disk"

    def _file(self, name: str) -> int:
        if name not in self._folders[-1]:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._folders[-1][name]

    def _changed(self, folder: dict[str, int]) -> None:
        self._folders.append(folder)

    def _holds(self, name: str, data: bytes, what: str) -> None:
        self._found[self._file(name)].append(bytes(data))
        self._did(what)

    def _did(self, what: str) -> None:
        names = dict.fromkeys(name for folder in self._folders for name in folder)
        found = {}
        for name in names:
            may = [
                d
                for folder in self._folders
                for d in (self._found[folder[name]] if name in folder else [None])
            ]
            found[name] = list(dict.fromkeys(may))
        self.steps.append((what, found))
