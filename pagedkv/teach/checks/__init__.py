"""One check per exercise: `checks.kv_bytes_per_token(mine)` says what is right, what is not, and what to ask."""

from ._core import use_variant  # noqa: F401
from .capstone import parts_joined, pool_choice, sealed_fault, serve_evening  # noqa: F401
from .lesson_01 import fits, kv_bytes_per_token, waste  # noqa: F401
from .lesson_02 import allocator, allocator_test, broken, free_list, release  # noqa: F401
from .lesson_03 import new_blocks, read, slots, slots_by_hand, tables  # noqa: F401
from .lesson_04 import drafts, extend_all, faulty_line, fork, manager, write  # noqa: F401
from .lesson_05 import attend_batch, attend_one, gqa, merge, plan  # noqa: F401
from .lesson_06 import beam_step, decode_step, shared_blocks, top_p  # noqa: F401
from .lesson_07 import block_keys, give_back, hit, next_evicted, revive, stale_line  # noqa: F401
from .lesson_08 import admit, crowded_line, preempt_until, resume, the_wall  # noqa: F401
from .lesson_09 import check_page, save_atomically, survivors, temporary_line, who_keeps  # noqa: F401
from .lesson_10 import diagnose, faulty_lines, quantile, rate, second_wall  # noqa: F401
from .lesson_11 import fenced_write, late_writes, page_box, racing_lines, reap  # noqa: F401
from .lesson_12 import choose, chunks, fair, flaws, interleaved  # noqa: F401
from .lesson_13 import blocks_after, crop, select, skipped_reorder  # noqa: F401
