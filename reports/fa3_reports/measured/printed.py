"""The command of a module that makes one page of measured beside simulated figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fa3_simulator.machine import Machine, load
from fa3verify.files import write_text

Make = Callable[[argparse.Namespace, Machine], str]


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m fa3_reports.measured.NAME``, with the options that all such modules have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m fa3_reports.measured.{name}", description=(about or "").split("\n")[0]
    )
    parser.add_argument("--machine", default="h200", help="h100, h200 or a .toml file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the page there")
    return parser


def printed(parser: argparse.ArgumentParser, make: Make, arguments: Sequence[str] | None) -> int:
    """Print the page, and write it where that is asked for; 2 and one line for a file that cannot be used."""
    chosen = parser.parse_args(arguments)
    try:
        text = make(chosen, load(chosen.machine)).rstrip("\n")
        if chosen.markdown:
            write_text(chosen.markdown, text + "\n")
    except (ValueError, OSError) as error:
        print(f"{parser.prog.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0
