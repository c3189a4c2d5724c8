"""What may change in a serving stack without changing a bit: a table of our kernels and the released FlashAttention-3.

Every kernel of :data:`KERNELS` is compared over every axis, as ``fa3verify compare KERNEL`` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fa3verify.compare.axes import AXES
from fa3verify.compare.run import RECIPES, Compared
from fa3verify.compare.tasks import body, run, tasks_of
from fa3verify.files import json_text, markdown_table, write_text
from fa3verify.version import __version__

KERNELS = (  # the columns of the table; at num_splits=0 the library chooses the splits
    *("twin.fp16", "twin.bf16", "twin.e4m3", "twin.flash3.fp16", "twin.flash3.bf16", "twin.flash3.e4m3"),
    *("twin.flash3.fp16[num_splits=0]", "twin.flash3.e4m3[num_splits=0]", "twin.fp16[num_splits=0]"),
    "twin.flash3.fp16[num_splits=4]",
)


def write(folder: Path, workers: int, tell: Callable[[str], None]) -> Path:
    """Compare all kernels, write ``README.md`` and ``table.json`` into a folder, and return the page's path.

    Parameters
    ----------
    folder : Path
    workers : int
        Processes; 0 is one for each core.
    tell : callable
        Called with the name of each comparison that has ended.
    """
    tasks = [task for kernel in KERNELS for task in tasks_of(kernel)]
    found = run(tasks, workers, tell)
    write_text(folder / "table.json", json_text(body(found, tasks)))
    write_text(folder / "README.md", page(found))
    return folder / "README.md"


def page(found: Sequence[Compared | None], version: str = __version__) -> str:
    """Return the table in Markdown, with axes in rows and kernels in columns.

    ``found`` has the comparisons of the first kernel over all axes, then those of the second one. ``version`` is the
    one of fa3verify that compared them.
    """
    rows = [
        [
            f"{axis.words} (`{axis.name}`)",
            ", ".join(map(str, axis.values)),
            *(cell(found[column * len(AXES) + i]) for column in range(len(KERNELS))),
        ]
        for i, axis in enumerate(AXES)
    ]
    head = ("what changes", "tried", *(f"`{kernel}`" for kernel in KERNELS))
    inputs = ", ".join(recipe.distribution for recipe in RECIPES)
    return (
        "# What may change in a serving stack without changing a bit\n\n"
        f"Written by `python -m fa3_reports invariance`, version {version}. Operands are given, not quantised again; "
        f"inputs: {inputs}. Equal is said of the outputs that ran, and proves nothing of others. Splits are the parts "
        "into which the keys of a row were cut in either call of a pair.\n\n" + "\n".join(markdown_table(head, rows))
    )


def cell(found: Compared | None) -> str:
    """Return the text of one comparison in the table; "-" for None, a kernel that lacks what the axis needs."""
    if found is None:
        return "-"
    if found.is_equal is None:
        return f"did not run: {found.refused}"
    if found.first is None:
        return f"equal over {found.outputs:,}{found.launched()}"
    return f"**differs** first at {found.value}: {found.because}"
