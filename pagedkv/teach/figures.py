"""The course's figures that several lessons would otherwise draw again. Needs matplotlib (extra `course`)."""

from collections.abc import Mapping, Sequence

from . import pages

BOX = 1.0  # a slot is one unit wide
GAP = 0.6  # between two blocks
ROWS = {"positions": 4.2, "block table": 2.2, "memory": 0.0}  # where each row stands


def through_the_table(
    table: Sequence[int],
    text: str,
    *,
    name: str = "a",
    others: Mapping[str, tuple[Sequence[int], str]] | None = None,
    num_blocks: int = 8,
    block_size: int = 4,
):
    """Draw the way of a text through its block table: positions above, the table, the pool below.

    Args: table: block ids in reading order; text: its tokens; name: the sequence, for its colour; others: table
        and text of other sequences in the same pool, by name.
    Returns: a matplotlib Figure with one arrow from each table entry to its block; for `plt.show()`.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 3.9))
    everyone = {name: (table, text), **(others or {})}
    owned = {
        block: (who, said[i * block_size : (i + 1) * block_size])
        for who, (blocks, said) in everyone.items()
        for i, block in enumerate(blocks)
    }
    width = num_blocks * (block_size * BOX + GAP) - GAP
    shift = (width - len(table) * (block_size * BOX + GAP) + GAP) / 2  # the text stands in the middle
    for block in range(num_blocks):
        who, letters = owned.get(block, (None, ""))
        left = _left(block, block_size)
        _block(axes, left, ROWS["memory"], letters, block_size, who)
        axes.text(left + block_size * BOX / 2, -0.55, f"block {block}", ha="center", va="center", fontsize=11)
    for entry, block in enumerate(table):
        left = shift + _left(entry, block_size)
        middle = left + block_size * BOX / 2
        letters = text[entry * block_size : (entry + 1) * block_size]
        _block(axes, left, ROWS["positions"], letters, block_size, name)
        for offset in range(len(letters)):
            position = entry * block_size + offset
            axes.text(left + offset * BOX + 0.5, ROWS["positions"] + 1.35, position, ha="center", fontsize=9)
        _entry(axes, middle, entry, block)
        _arrow(axes, (middle, ROWS["positions"] - 0.05), (middle, ROWS["block table"] + 0.92))
        _arrow(
            axes,
            (middle, ROWS["block table"]),
            (_left(block, block_size) + block_size / 2, ROWS["memory"] + 1.05),
        )
    for row, height in ROWS.items():
        axes.text(-0.6, height + 0.45, row, ha="right", va="center", fontsize=11)
    axes.set(xlim=(-4.6, width + 0.2), ylim=(-0.9, 6.0))
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    return figure


def _left(place: int, block_size: int) -> float:
    return place * (block_size * BOX + GAP)


def _block(axes, left: float, bottom: float, letters: str, block_size: int, who: str | None) -> None:
    from matplotlib.patches import Rectangle

    fill, ink = ("white", "#888888") if who is None else pages.colours(who)
    for offset in range(block_size):
        letter = letters[offset : offset + 1]
        box = Rectangle(
            (left + offset * BOX, bottom),
            BOX,
            BOX,
            facecolor=fill if letter else "white",
            edgecolor="#444444",
        )
        axes.add_patch(box)
        axes.text(
            left + offset * BOX + 0.5,
            bottom + 0.47,
            pages.shown(letter) or pages.UNFILLED,
            ha="center",
            va="center",
            family="DejaVu Sans Mono",
            fontsize=13,
            color=ink if letter else "#888888",
        )


def _entry(axes, middle: float, entry: int, block: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((middle - 0.7, ROWS["block table"]), 1.4, 0.9, facecolor="white", edgecolor="#000")
    )
    axes.text(
        middle, ROWS["block table"] + 0.43, block, ha="center", va="center", fontweight="bold", fontsize=13
    )
    axes.text(middle + 0.9, ROWS["block table"] + 0.43, f"entry {entry}", va="center", fontsize=9)


def _arrow(axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": "#0072B2", "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
