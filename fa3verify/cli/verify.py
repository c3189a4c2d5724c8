"""Verb verify: the release gate, a campaign over every input family and property."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich_click as click

from fa3verify.cli.exits import (
    EPILOG,
    Verb,
    ending_in_order,
    require_outputs,
    told_anyhow,
)
from fa3verify.cli.options import (
    Options,
    memory_bytes,
    output_options,
    peers_option,
    pool_options,
    refuse_options,
    seed_option,
)

OF_THE_WHOLE = ("baseline", "update_baseline", "json_target", "junit_target")  # options that need the whole campaign
NARROWING = ("families", "properties", "limit", "fail_fast")  # options whose results become no shard and no baseline


def _shard(_context: Any, _parameter: Any, value: str | None) -> Any:
    if value is None:
        return None
    from fa3verify.campaign.shards import Number

    try:
        return Number.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1)
@click.option(
    "--kernel", "references", multiple=True, metavar="MODULE:FUNCTION", help="Verify a kernel of your own as well."
)
@click.option("--profile", type=click.Choice(["quick", "release", "soak"]), default="release", show_default=True)
@click.option("--quick", is_flag=True, help="Short for --profile quick: minutes on two cores.")
@seed_option
@click.option(
    "--activations",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Judge on the Q, K and V of your own model as well: npz files of q, k and v.",
)
@click.option("--family", "families", multiple=True, metavar="PATTERN", help="Only these families, such as 'peak*'.")
@click.option(
    "--property", "properties", multiple=True, metavar="PATTERN", help="Only these properties, such as 'causal*'."
)
@click.option("--limit", type=click.IntRange(1), help="At most so many cases of a family and trials of a property.")
@click.option("--head-dim", "head_dims", type=click.IntRange(1), multiple=True, help="Only this head_dim.")
@click.option(
    "--order",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Hold every bit against the twin of this order as well, which fa3verify learn wrote.",
)
@click.option("--learn", "is_learning", is_flag=True, help="Learn each kernel's order first, and use it as --order.")
@click.option("--fail-fast", is_flag=True, help="The first finding ends it.")
@click.option(
    "--questions",
    "answer",
    type=click.Choice(["ask", "fail", "pass"]),
    default="ask",
    show_default=True,
    help="What a question does: exit code 6, a finding, or nothing but stand in the summary.",
)
@output_options
@pool_options
@click.option(
    "--scheduler", metavar="ADDRESS", help="Run on a Dask cluster. Dask's protocol carries code: trusted clusters only."
)
@peers_option
@click.option(
    "--shard", metavar="K/N", callback=_shard, help="Run one of N parts, for fa3verify merge; the same N everywhere."
)
def verify(kernels: tuple[str, ...], references: tuple[str, ...], profile: Any, quick: bool, **options: Any) -> None:
    """Judge KERNELS (all twins by default) by bits, bound, baseline and properties; write a report.

    With --family, --property or --limit only findings count: a part has no verdict, exit code 5.
    """
    began_s = time.monotonic()
    with ending_in_order():
        from fa3verify.campaign.introduction import Only
        from fa3verify.cli import console
        from fa3verify.commands import verify
        from fa3verify.kernels import twins

        targets = options["json_target"], options["junit_target"]
        require_outputs(*targets, options["update_baseline"])
        names = dict.fromkeys((*kernels, *references) or (c.name for c in twins.BUILT_IN))
        of_dims = f"@{','.join(map(str, options['head_dims']))}" if options["head_dims"] else ""
        asked = tuple(name + of_dims for name in names)
        orders = _orders(asked, options)
        settings = verify.Settings(
            tuple(f"{name}[order={orders[name]}]" if name in orders else name for name in asked),
            "quick" if quick else profile,
            options["seed"],
            options["out"],
            options["baseline"],
            options["update_baseline"],
            options["workers"],
            options["scheduler"],
            task_limit_s=options["task_limit"],
            activations=options["activations"],
            memory_bytes=memory_bytes(options["memory_limit"]),
            shard=options["shard"],
            only=Only(options["families"], options["properties"], options["limit"]),
            is_fail_fast=options["fail_fast"],
            answer=options["answer"],
            began_s=began_s,
        )
        if settings.shard:
            refuse_options(OF_THE_WHOLE, "{} is of the whole campaign: give it to fa3verify merge")
        if settings.shard or settings.update_baseline:
            refuse_options(NARROWING, "{} is of a part: neither a shard nor a baseline comes of it")
        stop = None
        with console.progress(options["quiet"]) as progress:
            try:
                result = (verify.run_shard if settings.shard else verify.run)(settings, progress)
            except verify.Interrupted as interruption:
                if interruption.found is None:
                    raise
                stop = interruption
                result = interruption.found
        with told_anyhow(result.exit_code):
            if isinstance(result, verify.ShardRun):
                console.print_shard(result, settings.out)
            else:
                console.tell(result, settings.out, *targets, options["quiet"], began_s=began_s)
            if stop:
                raise stop


def _orders(kernels: Sequence[str], options: Options) -> dict[str, Path]:
    """Return the files of learned orders by kernel, from --order, or learned now for --learn; empty without both.

    A kernel whose order is not found has no file and is judged without one, so that learning only adds findings.
    ValueError for --order with --learn or with several kernels.
    """
    from fa3verify.cli import console, console_search
    from fa3verify.commands.learn import learn_all

    if options["order"] and (options["is_learning"] or len(kernels) > 1):
        raise ValueError("--order FILE is of one kernel, and needs no --learn")
    if options["order"]:
        return {kernels[0]: options["order"]}
    files = {}
    for i, name in enumerate(kernels if options["is_learning"] else ()):
        with console.counting("head dims asked", options["quiet"]) as tell:
            learning = learn_all(name, options["head_dims"], workers=options["workers"], progress=tell)
        file = options["out"] / f"order-{i + 1}.json"
        is_written = learning.write(file)
        console_search.print_learning(learning, file if is_written else None)
        if is_written:
            files[name] = file
    return files
