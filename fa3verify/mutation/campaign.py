"""The verb ``mutants``: run what was asked for, write csv and Markdown, count what was missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fa3verify.files import write_text
from fa3verify.mutation import automatic, tables


def run(kinds: tuple[str, ...], progress: Callable[[str], None], **options: Any) -> tuple[int, str]:
    """Run a campaign of each kind; return how many mistakes were missed, and the pages as one text.

    Raises
    ------
    ValueError
        For an unknown module or kernel, or a folder with results of other code.
    """
    parts = [RUN[kind](progress, options) for kind in kinds]
    return sum(missed for missed, _ in parts), "\n".join(text for _, text in parts)


def _automatic(progress: Callable[[str], None], options: dict[str, Any]) -> tuple[int, str]:
    names = ("out", "count", "profile", "modules", "bits", "seed", "workers", "seconds")
    settings = automatic.Settings(**{name: options[name] for name in names})
    if options["kernels"]:
        settings = automatic.Settings(**{name: options[name] for name in names}, kernels=tuple(options["kernels"]))
    fates = automatic.run(settings, progress)
    text = tables.automatic(fates)
    write_text(Path(options["out"]) / "automatic.md", text)
    return sum(fate.status == "missed" for fate in fates), text


RUN: dict[str, Callable[[Callable[[str], None], dict[str, Any]], tuple[int, str]]] = {"automatic": _automatic}
