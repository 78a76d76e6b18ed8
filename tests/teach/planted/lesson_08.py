"""Wrong solutions of lesson 08, as learners write them. See ../test_planted.py."""

import numpy as np

from pagedkv import BlockManager
from pagedkv.serving import Request, Scheduler

# ---- preempt_until(server)


def names(server):
    return [request.name for request in server.running]


def out(server, place=-1, *, to_front=True):
    victim = server.running.pop(place)
    server.manager.free(victim.name)
    if to_front:
        server.waiting.appendleft(victim)
    else:
        server.waiting.append(victim)
    return victim


def first_arrived(server):
    while not server.manager.can_extend(names(server)):
        out(server, 0)


def one_victim_is_enough(server):
    if not server.manager.can_extend(names(server)):
        out(server)


def need_counted_once(server):
    need = server.manager.blocks_needed(names(server))
    while server.running and need > server.manager.num_free:
        out(server)


def back_of_the_queue(server):
    while not server.manager.can_extend(names(server)):
        out(server, to_front=False)


def blocks_kept(server):
    if not server.manager.can_extend(names(server)):
        server.waiting.appendleft(server.running.pop())


def text_thrown_away(server):
    while not server.manager.can_extend(names(server)):
        out(server).text.clear()


def always_one(server):
    out(server)
    while not server.manager.can_extend(names(server)):
        out(server)


def ask_the_packages(server):
    Scheduler(BlockManager(8, 4)).add(Request("a", num_tokens=1))


# ---- resume(model, cache, request)


def resumer(tokens, *, add=True, prepare=lambda request: None, choose=True):
    """A resume that differs from a right one in what is said."""

    def resume(model, cache, request):
        if add:
            cache.add(request.name)
        prepare(request)
        logits = model.next_logits(cache, request.name, [tokens(request)])[0]
        if choose:
            request.text.append(request.choose(logits))

    return resume


def everything(request):
    return request.prompt + request.text


def prompt_only(request):
    return request.prompt


def without_the_last(request):
    return (request.prompt + request.text)[: max(len(request.prompt), request.known - 1)]


def text_only(request):
    return request.text or request.prompt


def text_first(request):
    return request.text + request.prompt


def reseeded(request):
    request.stream = np.random.default_rng(request.seed)


def drawn_again(request):
    request.stream = np.random.default_rng(request.seed)
    request.stream.random(len(request.text) + 1)


def started_over(request):
    request.text.clear()
    reseeded(request)


# ---- admit(waiting, free, budget, block_size, watermark)


def admits(
    *,
    stop=True,
    hits_in_blocks=True,
    hits_in_budget=True,
    watermark_counts=True,
    shrinks=True,
    up=True,
    budget_counts=True,
):
    def admit_names(waiting, free, budget, block_size, watermark):
        found = []
        for name, tokens, hit in waiting:
            blocks = -(-tokens // block_size) if up else tokens // block_size
            blocks -= hit // block_size if hits_in_blocks else 0
            cost = tokens - (hit if hits_in_budget else 0)
            room = free - (watermark if watermark_counts else 0)
            if blocks > room or (budget_counts and cost > budget):
                if stop:
                    break
                continue
            if shrinks:
                free, budget = free - blocks, budget - cost
            found.append(name)
        return found

    return admit_names


BUGS = [
    ("the_wall", "all three blocks", (("d", 3, 12), ("c", 2, 16)), "who else reads them"),
    ("the_wall", "the first arrived", (("a", 1, 12), ("b", 2, 16)), "who of those that run came last"),
    ("the_wall", "all four of c", (("d", 1, 12), ("c", 4, 16)), "c has 4 blocks in its table"),
    ("the_wall", "the answer only", (("d", 1, 2), ("c", 2, 6)), "comes back to an empty table"),
    ("the_wall", "nothing again", (("d", 1, 0), ("c", 2, 0)), "comes back to an empty table"),
    ("the_wall", "one wall", ("d", 1, 12), "two rows of three"),
    ("preempt_until", "the first arrived", first_arrived, "who has run longest"),
    ("preempt_until", "one victim is enough", one_victim_is_enough, "ask the pool again"),
    ("preempt_until", "need counted once", need_counted_once, "what do the others need now"),
    ("preempt_until", "back of the queue", back_of_the_queue, "of those that wait, who came first"),
    ("preempt_until", "blocks kept", blocks_kept, "who gives their blocks back"),
    ("preempt_until", "text thrown away", text_thrown_away, "may it change"),
    ("preempt_until", "always one", always_one, "is there room for everybody already"),
    ("preempt_until", "the package's scheduler", ask_the_packages, "calls the package's Scheduler"),
    ("resume", "prompt only", resumer(prompt_only), "who remembers what d wrote itself"),
    ("resume", "last token left out", resumer(without_the_last), "of which tokens does the next letter need"),
    ("resume", "text only", resumer(text_only), "of which tokens does the next letter need"),
    ("resume", "text in front of the prompt", resumer(text_first), "which tokens, at which positions"),
    ("resume", "reseeded", resumer(everything, prepare=reseeded), "if nobody had disturbed it"),
    ("resume", "one number too many", resumer(everything, prepare=drawn_again), "if nobody had disturbed it"),
    ("resume", "started over", resumer(everything, prepare=started_over), "may it change"),
    ("resume", "nothing chosen", resumer(everything, choose=False), "who chooses it"),
    ("admit", "jumps the queue", admits(stop=False), "who has waited longer"),
    ("admit", "hits take blocks", admits(hits_in_blocks=False), "does nobody have to give it"),
    (
        "admit",
        "hits take budget",
        admits(hits_in_budget=False),
        "which tokens of a prompt need not be computed",
    ),
    ("admit", "no watermark", admits(watermark_counts=False), "free after the admission"),
    ("admit", "nothing gets less", admits(shrinks=False), "those in front have taken theirs"),
    ("admit", "rounded down", admits(up=False), "those in front have taken theirs"),
    ("admit", "no budget", admits(budget_counts=False), "may anybody overtake for its sake"),
    ("crowded_line", "the victim's line", 3, "Why was it there at all"),
    ("crowded_line", "the pieces", 5, "what does this line promise"),
    ("crowded_line", "not after a victim", 6, "what does this line promise"),
    ("crowded_line", "the first share", 1, "what is it going to need"),
    ("crowded_line", "no line", 13, "1 to 12"),
]
