"""What is sealed in pagedkv/teach/sealed.txt: a small pool of letters, sound or with one of six faults.

Readers of the course: this is the answer of the capstone's last exercise.

To seal it again after a change: `python -m pagedkv.teach.capstone tests/teach/planted/sealed_faults.py`.
"""

from pagedkv.allocator import PoolExhausted
from pagedkv.teach import pages

FAULTS = {0: None, 1: "d", 2: "b", 3: "f", 4: "c", 5: "e", 6: "a"}


class Pool:
    """Lesson 04's pool of letters: `add`, `append`, `fork`, `free`, `read`; and what an inspector looks at."""

    def __init__(self, fault, num_blocks=8, block_size=4):
        self.__fault = fault
        self.num_blocks, self.block_size = num_blocks, block_size
        self.letters = pages.Letters(num_blocks, block_size)
        self.queue = list(range(num_blocks))  # free block ids, the next one first
        self.owners = [0] * num_blocks  # [num_blocks]
        self.tables, self.lengths = {}, {}

    @property
    def num_free(self):
        return len(self.queue)

    def add(self, name, text):
        self.tables[name], self.lengths[name] = [], 0
        try:
            self.append({name: text})
        except PoolExhausted:
            del self.tables[name], self.lengths[name]
            raise

    def append(self, texts):
        """Let sequences go on, all of the batch or none: {"a": ",", "b": "!"}."""
        if self.__fault != "e":
            moved_out, needed = {}, 0
            for name, text in texts.items():
                needed += self.__needs(name, len(text), moved_out)
            self.__refuse_above(needed)
        for name, text in texts.items():
            self.__refuse_above(self.__needs(name, len(text), {}))
            self.__write(name, text)

    def fork(self, parent, children):
        for number, child in enumerate(children):
            table = self.tables[parent]
            self.tables[child] = table if self.__fault == "f" else list(table)
            self.lengths[child] = self.lengths[parent]
            for block in table:
                self.owners[block] += not (self.__fault == "a" and number)

    def free(self, name):
        table = self.tables.pop(name)
        full = self.lengths.pop(name) % self.block_size == 0
        for block in table[:-1] if self.__fault == "d" and full else table:
            self.__release(block)

    def read(self, name):
        slots = [self.__slot(name, position) for position in range(self.lengths[name])]
        return self.letters.read(slots)

    def strip(self, caption=None):
        return pages.strip_of(
            self.tables,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free=self.queue,
            letters=self.letters,
            lengths=self.lengths,
            caption=caption,
        )

    def __repr__(self):
        return repr(self.strip())

    def _repr_html_(self):
        return self.strip("The pool now")._repr_html_()

    def __slot(self, name, position):
        return self.tables[name][position // self.block_size] * self.block_size + position % self.block_size

    def __refuse_above(self, needed):
        if needed > self.num_free:
            raise PoolExhausted(needed, self.num_free)

    def __copies(self, name, moved_out):
        """Whether its next letter goes into a block that somebody else reads."""
        if self.lengths[name] % self.block_size == 0:
            return False
        tail = self.tables[name][-1]
        return self.owners[tail] - moved_out.get(tail, 0) > (2 if self.__fault == "b" else 1)

    def __needs(self, name, n, moved_out):
        length, size = self.lengths[name], self.block_size
        copies = n > 0 and self.__copies(name, moved_out)
        if copies:
            tail = self.tables[name][-1]
            moved_out[tail] = moved_out.get(tail, 0) + 1
        return -(-(length + n) // size) - -(-length // size) + copies

    def __write(self, name, text):
        table, size = self.tables[name], self.block_size
        if text and self.__copies(name, {}):
            old, new, filled = table[-1], self.__take(), self.lengths[name] % size
            self.letters.copy_blocks([[old, new, filled - (self.__fault == "c" and filled > 1)]])
            table[-1] = new
            self.__release(old)
        for letter in text:
            if self.lengths[name] % size == 0:
                table.append(self.__take())
            self.lengths[name] += 1
            self.letters.write([self.__slot(name, self.lengths[name] - 1)], letter)

    def __take(self):
        block = self.queue.pop(0)
        self.owners[block] = 1
        return block

    def __release(self, block):
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.queue.insert(0, block)
