"""Verb record: what released kernels return on this GPU, by digest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb, require_device
from fa3verify.cli.options import peers_option

if TYPE_CHECKING:
    from fa3_reports.bits.record import Which

LIBRARIES = (
    "flash3",
    "flash3.dew",
    "vllm",
    "sglang",
    "flash2",
    "cudnn",
)  # checked by a test: those whose bits a twin has


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("libraries", metavar="LIBRARY...", nargs=-1, required=True, type=click.Choice(LIBRARIES))
@peers_option
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/recordings"), show_default=True
)
@click.option("--cases", "which", type=click.Choice(("broad", "corners", "gaps")), default="broad", show_default=True)
@click.option("--every", type=click.IntRange(1), default=1, help="Only every so manieth case, to compare two GPUs.")
@click.option(
    "--rounds", type=click.IntRange(0), default=8, show_default=True, help="How many rounds of long launches."
)
@click.option("--workers", type=click.IntRange(1), default=14, show_default=True, help="Processes that share the GPU.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=600.0, show_default=True, help="After which the rest is left."
)
def record(
    libraries: tuple[str, ...],
    out: Path,
    which: Which,
    every: int,
    rounds: int,
    workers: int,
    seconds: float,
) -> None:
    """Launch released kernels on many cases and keep digests of O and LSE: OUT/LIBRARY.xz, and small outputs whole.

    Corner cases go to OUT/LIBRARY.corners.xz: rows and sequences without a key, infinite scores, one query and such;
    gaps, OUT/LIBRARY.gaps.xz, are what neither set decided.
    python -m fa3_reports recordings NEW.xz --against OLD.xz then says whether an update of a library changed a bit.
    """
    require_device("record")
    from fa3_reports.bits.record import chosen, record as make

    out.mkdir(parents=True, exist_ok=True)
    given = {library: chosen(library, which, rounds=rounds, every=every) for library in libraries}
    suffix = "" if which == "broad" else f".{which}"
    make(given, out, suffix=suffix, workers=workers, seconds=seconds, tell=click.echo)
