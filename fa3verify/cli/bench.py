"""Verb bench: our forward beside other people's on a shape of the user's own, timed on a Hopper GPU."""

from __future__ import annotations

import fnmatch
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit, require_device, require_writable
from fa3verify.cli.options import peers_option, shape_options
from fa3verify.cli.simulate import problem_of

ROW = "{kernel:<10}  {milliseconds:9.4f}  {tflops:7.1f}  {times_ours:11.2f}  {sm_mhz:6.0f}"


@click.command(cls=Verb, epilog=EPILOG)
@shape_options
@click.option("--softcap", type=click.FloatRange(0), default=0.0, show_default=True, help="Of scores; 0 for none.")
@click.option(
    "--kernel",
    "patterns",
    metavar="NAME",
    multiple=True,
    help="gluon (ours), flash3, cudnn and so on, or a pattern of names; all by default.",
)
@peers_option
@click.option("--json", "json_target", metavar="FILE|-", help="Write the figures as JSON.")
def bench(patterns: tuple[str, ...], json_target: str | None, **options: Any) -> None:
    """Time our forward beside other people's on one problem; a kernel whose output is wrong has no speed."""
    from fa3_kernels.plan.families import OURS
    from fa3verify.known.peers import PEERS

    names = _fitting([OURS, *(name for name, peer in PEERS.items() if peer.is_timed)], patterns)
    problem = problem_of(options)
    require_device("bench")
    require_writable(json_target)
    from fa3verify.bench.kernels import speeds

    found = speeds(problem, names)
    emit(found, json_target)
    if json_target != "-":
        click.echo(f"{found['problem']}, on {found['gpu']}\nkernel             ms  TFLOP/s  time / ours  SM MHz")
        for x in sorted(found["kernels"], key=lambda x: x["status"] != "timed"):
            click.echo((ROW if x["status"] == "timed" else "{status}: {kernel}: {reason}").format(**x))
    statuses = {x["kernel"]: x["status"] for x in found["kernels"]}
    is_wrong = "wrong" in statuses.values() or statuses.get(OURS) == "failed"
    raise Exit(FINDING if is_wrong else OK if "timed" in statuses.values() else NOTHING)


def _fitting(known: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names that fit a pattern, all without patterns; ValueError for a pattern that none fits."""
    if unknown := [pattern for pattern in patterns if not fnmatch.filter(known, pattern)]:
        raise ValueError(f"--kernel must be one of {', '.join(known)}, or a pattern of them, got {unknown[0]!r}")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns or "*")]
