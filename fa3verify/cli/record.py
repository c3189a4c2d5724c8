"""Verb record: what released kernels return on this GPU, by digest."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from fa3verify.cli.exits import EPILOG, one_line_errors, require_device
from fa3verify.cli.options import peers_option

LIBRARIES = ("flash3", "flash3.dew", "flash2", "cudnn")  # checked by a test: those whose bits a twin has


@click.command(epilog=EPILOG)
@click.argument("libraries", metavar="LIBRARY...", nargs=-1, required=True, type=click.Choice(LIBRARIES))
@peers_option
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/recordings"), show_default=True
)
@click.option(
    "--rounds", type=click.IntRange(0), default=8, show_default=True, help="How many rounds of long launches."
)
@click.option("--workers", type=click.IntRange(1), default=14, show_default=True, help="Processes that share the GPU.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=600.0, show_default=True, help="After which the rest is left."
)
def record(libraries: tuple[str, ...], out: Path, rounds: int, workers: int, seconds: float) -> None:
    """Launch released kernels on many cases and keep digests of O and LSE: OUT/LIBRARY.xz, and small outputs whole.

    fa3verify recordings NEW.xz --against OLD.xz then says whether an update of a library changed a bit.
    """
    with one_line_errors():
        require_device("record")
        from fa3verify.gpu.bits.record import record as make

        out.mkdir(parents=True, exist_ok=True)
        make(libraries, out, rounds=rounds, workers=workers, seconds=seconds, tell=click.echo)
