"""The prefix cache written down again with plain lists, for comparison: slow, without digests, without a plan.

A block that can be found is known by its *whole* text: the salt and every token from the first on.
"""

import copy
from dataclasses import dataclass, field


class Full(Exception):
    """No free block is left."""


@dataclass
class PlainSequence:
    salt: str | None = None
    prompt: list = field(default_factory=list)  # announced tokens, as far as they are not cut off
    table: list = field(default_factory=list)  # blocks, −1 where one was left behind
    length: int = 0
    final: list = field(default_factory=list)  # committed tokens


class PlainPool:
    """Tables, the queue and the texts of blocks; every method does one thing after the other."""

    def __init__(self, num_blocks, block_size, prefix_cache=True):
        self.block_size, self.prefix_cache = block_size, prefix_cache
        self.plain, self.cached = list(range(num_blocks)), []  # the free queue in its two parts, front first
        self.seqs = {}
        self.texts = {}  # block -> (salt, token, …) from the first token on; oldest block first
        self.asked = [0, 0, 0]  # requests, prompt tokens, tokens found

    @property
    def queue(self):
        return self.plain + self.cached

    def owners(self, block):
        return sum(seq.table.count(block) for seq in self.seqs.values())

    def take(self):
        if not self.queue:
            raise Full
        block = (self.plain or self.cached).pop(0)
        self.texts.pop(block, None)
        return block

    def give_back(self, blocks):
        """Blocks that no table names any more, each once, in the order of their last release."""
        freed = [b for i, b in enumerate(blocks) if self.owners(b) == 0 and b not in blocks[i + 1 :]]
        self.cached += [block for block in freed if block in self.texts]
        self.plain = [block for block in freed if block not in self.texts] + self.plain
        return freed

    def text(self, seq, blocks):
        """What the first so many blocks of a sequence hold, if that is final."""
        return (seq.salt, *seq.final[: blocks * self.block_size])

    def find(self, name):
        seq, found = self.seqs[name], []
        if seq.length or not self.prefix_cache:
            return found
        for n in range(1, (len(seq.prompt) - 1) // self.block_size + 1):
            text = (seq.salt, *seq.prompt[: n * self.block_size])
            equal = [block for block, other in self.texts.items() if other == text]
            if not equal:
                break
            found.append(equal[0])
        return found

    def extend(self, names, counts):
        """Returns the copies; Full leaves everything as it was."""
        before = copy.deepcopy(self.__dict__)
        try:
            return self._extend(names, counts)
        except Full:
            self.__dict__.update(before)
            raise

    def _extend(self, names, counts):
        prompts, tokens, found = 0, 0, 0
        hits = {name: self.find(name) for name in names}
        for name, n in zip(names, counts, strict=True):
            seq = self.seqs[name]
            if n and not seq.length and seq.prompt:
                prompts, tokens = prompts + 1, tokens + len(seq.prompt)
                found += len(hits[name]) * self.block_size
                seq.table, seq.length = list(hits[name]), len(hits[name]) * self.block_size
                seq.final = seq.prompt[: seq.length]
                self.cached = [block for block in self.cached if block not in hits[name]]
        copies = []
        for name, n in zip(names, counts, strict=True):
            seq = self.seqs[name]
            if n and seq.length % self.block_size:
                tail = seq.table[-1]
                if self.owners(tail) > 1:
                    seq.table[-1] = self.take()
                    copies.append([tail, seq.table[-1], seq.length % self.block_size])
                else:
                    self.texts.pop(tail, None)
            seq.length += n
            while len(seq.table) * self.block_size < seq.length:
                seq.table.append(self.take())
        if self.prefix_cache and prompts:
            self.asked = [a + b for a, b in zip(self.asked, (prompts, tokens, found), strict=True)]
        return copies

    def commit(self, name, tokens):
        seq = self.seqs[name]
        first = len(seq.final) // self.block_size
        seq.final = seq.final + tokens
        for i in range(first, len(seq.final) // self.block_size):
            if self.prefix_cache and seq.table[i] >= 0 and seq.table[i] not in self.texts:
                self.texts[seq.table[i]] = self.text(seq, i + 1)

    def fork(self, parent, child):
        self.seqs[child] = copy.deepcopy(self.seqs[parent])

    def reorder(self, names, parents):
        moved = [i for i, p in enumerate(parents) if p != i]
        dropped = [b for i in moved for b in self.seqs[names[i]].table[::-1] if b >= 0]
        new = {names[i]: copy.deepcopy(self.seqs[names[parents[i]]]) for i in moved}
        self.seqs.update(new)
        return self.give_back(dropped)

    def truncate(self, name, length):
        seq, keep = self.seqs[name], -(-length // self.block_size)
        if length == seq.length:
            return []
        cut, seq.table = seq.table[keep:], seq.table[:keep]
        seq.length, seq.final, seq.prompt = length, seq.final[:length], seq.prompt[:length]
        freed = self.give_back([block for block in cut[::-1] if block >= 0])
        if length % self.block_size and self.owners(seq.table[-1]) == 1:
            self.texts.pop(seq.table[-1], None)
        return freed

    def release_before(self, name, position):
        seq, whole = self.seqs[name], position // self.block_size
        left = [block for block in seq.table[:whole][::-1] if block >= 0]
        seq.table[:whole] = [-1] * whole
        return self.give_back(left)

    def free(self, names):
        dropped = [b for name in names for b in self.seqs.pop(name).table[::-1] if b >= 0]
        return self.give_back(dropped)

    def restore(self, other, names):
        """Take sequences over from another pool (which keeps them): pairs of blocks."""
        new = copy.deepcopy({name: other.seqs[name] for name in names})
        old = list(dict.fromkeys(b for seq in new.values() for b in seq.table if b >= 0))
        if len(old) > len(self.queue):
            raise Full
        here = {block: self.take() for block in old}
        for name, seq in new.items():
            seq.table = [here.get(block, -1) for block in seq.table]
            self.seqs[name] = seq
            for i in range(len(seq.final) // self.block_size if self.prefix_cache else 0):
                if seq.table[i] >= 0 and seq.table[i] not in self.texts:
                    self.texts[seq.table[i]] = self.text(seq, i + 1)
        return [list(pair) for pair in here.items()]

    def reset(self):
        if any(block >= 0 for seq in self.seqs.values() for block in seq.table):
            return False
        self.plain, self.cached, self.texts = self.queue, [], {}
        return True
