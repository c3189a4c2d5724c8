"""Options that several verbs share, such as those of the problem and the schedule, and whether one was given."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import rich_click as click
from click import get_current_context
from click.core import ParameterSource

from fa3_reference.rules import require
from fa3verify.campaign.pool import DEVICES_VARIABLE
from fa3verify.known.libraries import FOLDER_VARIABLE

Decorator = Callable[[Callable], Callable]
Options = dict[str, Any]  # values of options, by the names of a command's parameters
VARIABLES = {"peers": FOLDER_VARIABLE, "devices": DEVICES_VARIABLE}  # by the options that put a value there
KERNEL_HELP = "Whose: gluon (ours), flash3 or flash4; backward gluon or flash3."


def _numbers(pattern: str, example: str, _context: Any, _parameter: Any, value: str | None) -> tuple[int, ...] | None:
    """Read the whole numbers of an option; other texts than ``pattern`` are errors."""
    if value is not None and not re.fullmatch(pattern, value):
        raise click.BadParameter(f"must be {example}, got {value!r}")
    return tuple(map(int, re.findall(r"\d+", value))) if value else None


_lengths = partial(_numbers, r"\d+(,\d+)*", "lengths such as 300,1,500")


def _remember(_context: Any, parameter: click.Parameter, value: str | None) -> None:
    """Put the value of an option into its environment variable, which worker processes have as well."""
    if value:
        os.environ[VARIABLES[str(parameter.name)]] = value


def group(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options to a command; its help lists the first one last."""
    return lambda command: reduce(lambda made, option: option(made), options, command)


peers_option = click.option(
    "--peers",
    type=click.Path(file_okay=False, resolve_path=True),
    expose_value=False,
    callback=_remember,
    help=f"Folder with other people's libraries; {FOLDER_VARIABLE} by default.",
)
seed_option = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
workers_option = click.option(
    "--workers", type=click.IntRange(0), default=0, help="Processes; 0 is one per core, of atlas half as many again."
)
devices_option = click.option(
    "--devices",
    metavar="all|N,N,...",
    expose_value=False,
    callback=_remember,
    help="GPUs that the workers are dealt out to; by default all use the first one.",
)
# Options of the processes that kernels run in.
pool_options = group(
    devices_option,
    click.option(
        "--memory-limit",
        type=click.FloatRange(0),
        metavar="GIB",
        help="Memory of each worker; 0 is no limit. By default an equal share of the machine's, at least 8.",
    ),
    click.option(
        "--task-limit",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Time after which a case or trial counts as hung, first calls apart: they may compile, and have five "
        "times as long. 60 by default for quick, 900 for release, 3600 for soak.",
    ),
    workers_option,
)


# Options that say what a verdict compares with and where it is written.
output_options = group(
    click.option("--quiet", is_flag=True, help="Print the verdict only."),
    click.option("--junit", "junit_target", metavar="FILE|-", help="Also write JUnit XML (extra 'junit')."),
    click.option("--json", "json_target", metavar="FILE|-", help="Also write the summary there; - is standard output."),
    click.option(
        "--update-baseline",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Write the figures of this run as a baseline; kernels that were not judged keep theirs.",
    ),
    click.option(
        "--baseline",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Compare with this baseline, not the shipped one.",
    ),
    click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out"), show_default=True),
)


def memory_bytes(gib: float | None) -> int | None:
    """Return what ``--memory-limit`` says in bytes."""
    return None if gib is None else int(gib * 2**30)


# Options that say what is computed.
shape_options = group(
    click.option("--dtype", type=click.Choice(["fp16", "bf16", "e4m3"]), default="fp16", show_default=True),
    click.option("--head-dim", type=click.IntRange(8, 256), default=128, show_default=True),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True),
    click.option("--nheads", type=click.IntRange(1), default=16, show_default=True),
    click.option("--nheads-kv", type=click.IntRange(1), help="Heads of K and V; those of Q by default."),
    click.option("--seqlen", type=click.IntRange(1), default=8192, show_default=True),
    click.option("--seqlen-q", type=click.IntRange(1), help="Queries; as many as keys by default."),
    click.option("--causal", is_flag=True),
    click.option(
        "--window",
        type=click.IntRange(-1),
        nargs=2,
        default=(-1, -1),
        show_default=True,
        metavar="LEFT RIGHT",
        help="Keys seen on either side of the diagonal, -1 for all.",
    ),
)
# Options that say what is simulated, and at which clock.
problem_options = group(
    shape_options,
    click.option("--page-size", type=click.IntRange(1), metavar="KEYS", help="Of a cache in pages; ours, forward."),
    click.option(
        "--seqlens-k", callback=_lengths, metavar="N,N,...", help="Keys of packed sequences; as --seqlens-q by default."
    ),
    click.option(
        "--seqlens-q", callback=_lengths, metavar="N,N,...", help="Queries of packed sequences; --seqlen-q each."
    ),
    click.option(
        "--pack-gqa/--no-pack-gqa",
        default=None,
        help="Rows of a tile are the heads of a group, so K and V are read once; by default as a server's call has it, "
        "and apart in a plain batch.",
    ),
    click.option("--clock-mhz", type=click.FloatRange(100, 4000), help="SM clock; the machine's maximum by default."),
    click.option("--json", "json_target", metavar="FILE|-", help="Write the figures as JSON."),
)


machine_option = click.option("--machine", default="h200", show_default=True, help="h100, h200 or a .toml file.")
backward_option = click.option(
    "--backward", is_flag=True, help="The gradients, in fp16 or bf16; by default with the kernel's own tile."
)


# Options that say with which schedule it is computed.
schedule_options = group(
    click.option(
        "--tile",
        callback=partial(_numbers, r"\d+x\d+", "ROWSxKEYS such as 128x176"),
        metavar="ROWSxKEYS",
        help="The kernel's own by default.",
    ),
    click.option("--stages", type=click.IntRange(1, 8), default=2, show_default=True),
    click.option(
        "--schedule",
        help="pingpong, and overlap or overlap3 (three stages), joined by +, or none; by default the kernel's own, "
        "and pingpong+overlap with a tile that it does not launch.",
    ),
    click.option(
        "--promotion-interval",
        type=click.IntRange(0),
        help="e4m3: keys per promotion of P V, 0 for none; the kernel's own by default.",
    ),
    click.option(
        "--num-splits",
        type=click.IntRange(0, 256),
        help="Parts of the keys, 0 as the shape has it; 1 by default, and over pages 0.",
    ),
    click.option(
        "--kernel",
        metavar="FAMILY",
        default="gluon",
        show_default=True,
        help=KERNEL_HELP,
    ),
    click.option("--p-in-smem", is_flag=True, help="P V reads P from shared memory, not from registers."),
    backward_option,
    click.option(
        "--turns",
        type=click.Choice(["free", "ascending", "descending", "shift"]),
        default="free",
        show_default=True,
        help="Backward: in which order key tiles add to dQ; free is not deterministic.",
    ),
)


def is_given(name: str) -> bool:
    """Tell whether the running command was given an option, even with the value of its default."""
    return get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_options(names: Iterable[str], rule: str) -> None:
    """Raise ValueError if the running command was given any of these options.

    They stand for {} in the rule, as users write them (``--head-dim``).
    """
    known = {p.name: p.opts[-1] for p in get_current_context().command.params}
    given = [known[name] for name in names if is_given(name)]
    require(not given, rule.format(", ".join(given)))
