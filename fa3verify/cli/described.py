"""Kernels that somebody described, and families, as verbs take them: ``FILE.py:KERNEL,stages=3`` or ``flash3``.

``simulate``, ``hazards`` and ``tune`` use this.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from fa3_reference.rules import require
from fa3verify.cli.options import group

if TYPE_CHECKING:
    from fa3_simulator.description import Schedule
    from fa3_simulator.machine import Machine

set_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of described kernels."
)
what_if_option = click.option(
    "--what-if",
    "what_if",
    multiple=True,
    metavar="NAME=xN|+N",
    help="Another machine: tensor, mufu, vector, port, l2, hbm or barriers N times as fast (mufu=x2), or more smem "
    "(+64K bytes) or registers (+16 a thread).",
)
described_options = group(what_if_option, set_option)
cubin_options = group(
    click.option(
        "--function", default="", metavar="REGEX", help="Of --cubin the function in whose name this is found."
    ),
    click.option(
        "--cubin",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="The described kernel as compiled, in a cubin, fatbin or library: its counts beside the description's.",
    ),
)
SUFFIXES = {"K": 2**10, "M": 2**20}


def is_described(kernel: str) -> bool:
    """Tell whether a kernel is named by the file that describes it."""
    return kernel.split(",")[0].split(":")[0].endswith(".py")


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def pair(text: str) -> tuple[str, str]:
    """Return the name and the value of a setting; ValueError for another text."""
    name, equals, value = text.partition("=")
    require(bool(name and equals), f"a setting is NAME=VALUE, got {text}")
    return name, value


def schedule_of(kernel: str, settings: Sequence[str] = ()) -> Schedule:
    """Return the schedule that ``FILE.py:KERNEL,NAME=VALUE`` names, with the settings of ``--set`` in front of its own.

    KERNEL may be left out where the file describes one. ValueError for what is not there.
    """
    from fa3_simulator.description import described

    place, *own = kernel.split(",")
    path, _, name = place.partition(":")
    known = described(Path(path))
    require(name in known or (not name and len(known) == 1), f"name one of {path}: {', '.join(known)}")
    return known[name or next(iter(known))](**{x: _value(value) for x, value in map(pair, (*settings, *own))})


def machine_of(name: str, changes: Sequence[str]) -> Machine:
    """Return a machine, by name or file, with the changes of ``--what-if``; ValueError for one that is not known."""
    from fa3_simulator.machine import load
    from fa3_simulator.what_if import RATES, SIZES, changed

    machine = load(name)
    for text in changes:
        thing, value = pair(text)
        is_rate = value.startswith("x")
        known = RATES if is_rate else SIZES
        require(
            thing in known and value[:1] in ("x", "+"),
            f"--what-if takes {', '.join(RATES)} as NAME=xN, and {', '.join(SIZES)} as NAME=+N, got {text}",
        )
        number = float(value[1:].rstrip("KM")) * SUFFIXES.get(value[-1], 1)
        machine = changed(machine, thing, number) if is_rate else changed(machine, thing, more=number)
    return machine


def ranges_of(over: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each parameter of ``--over``: ``stages=2:4`` has both ends, ``bn=96:192:16`` a step, and
    ``bn=64,128`` is a list.

    ValueError for a range without values.
    """
    ranges = {}
    for name, text in map(pair, over):
        first, *others = text.split(":")
        ranges[name] = (
            list(range(int(first), int(others[0]) + 1, *map(int, others[1:2])))
            if others
            else [_value(each) for each in text.split(",")]
        )
        require(bool(ranges[name]), f"--over {name}={text} has no value")
    return ranges
