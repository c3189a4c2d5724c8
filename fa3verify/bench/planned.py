"""Says without a GPU what bench would launch and time: our launch, its work and simulated time, and who is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from fa3_kernels.plan import choose, families, plan, request
from fa3_kernels.plan.backward import backward_plan
from fa3_reference.problem import AttentionProblem
from fa3_simulator import backward_choice, cta, launch, machine, run
from fa3verify.cases.lines import Asked
from fa3verify.files import Json
from fa3verify.known.peer_kernels import kernels
from fa3verify.known.peers import BACKWARDS, PEERS
from fa3verify.operations import FORWARD
from fa3verify.text import one_line

TIMED = {
    FORWARD: (families.OURS, *(name for name, peer in PEERS.items() if peer.is_timed)),
    "backward": (families.OURS, f"{families.OURS}.deterministic", *BACKWARDS),
}


def planned(asked: Asked, names: Sequence[str], gpu: str = "h200") -> Json:
    """Return what would be timed of a problem.

    Parameters
    ----------
    asked : (AttentionProblem, {"forward", "backward"})
    names : sequence of str
        Of :data:`TIMED`, for this operation.
    gpu : str
        A machine of the simulator.

    Returns
    -------
    dict
        What ``bench --dry-run --json`` writes for a problem: ``launch`` is our launch in words, empty where we refuse
        the problem. ``gbytes`` count every tensor of it once, and ``milliseconds`` are simulated; both are NaN where
        the simulator knows no such launch. ``kernels`` has for each name why it would not be timed, else "".
    """
    problem, operation = asked
    on = machine.load(gpu)
    unknown = {"launch": "", "gbytes": math.nan, "milliseconds": math.nan}
    found: Json = {"problem": told(asked), "machine": gpu, "gflop": work(asked) / 1e9, **unknown}
    refused = ""
    try:
        found["launch"], config = _launch(problem, operation, int(on["sms"]))
        with suppress(ValueError):
            moved = cta.kernel_of(config).compiled(problem).launch(problem, on, on["max_clock_mhz"]).hbm_bytes
            found |= {
                "gbytes": moved / 1e9,
                "milliseconds": run.estimate(problem, config, on).seconds * 1e3,
            }
    except ValueError as error:
        refused = one_line(error)
    reasons = ((refusal(x, asked) or PEERS[x].missing() or "") if x in PEERS else refused for x in names)
    return found | {"kernels": dict(zip(names, reasons, strict=True))}


def told(asked: Asked) -> str:
    """Return what is timed in words."""
    return run.in_words(asked[0]) + f", {asked[1]}" * (asked[1] != FORWARD)


def work(asked: Asked) -> float:
    """Return the operations that TFLOP/s are counted from, as the field does: a backward has 2.5 times a forward's."""
    problem, operation = asked
    return launch.flops(problem, (problem.head_dim + problem.head_dim_v) / 2) * (1 if operation == FORWARD else 2.5)


def _launch(problem: AttentionProblem, operation: str, sms: int) -> tuple[str, cta.AnyConfig]:
    """Return our launch in words, and its configuration as the simulator takes it; ValueError where there is none."""
    if operation == FORWARD:
        made = plan.plan_of(request.request_for(problem, request.Choices(num_splits=0)), sms)
        config: cta.AnyConfig = made.config
    else:
        made = backward_plan(choose.without_lengths(problem), sms)
        config = backward_choice.shipped_schedule(problem)
    parts, is_packed, *_ = cta.kernel_of(config).row
    words = f"tile {config.tile_m} x {config.tile_n}{', heads packed' * is_packed}{f', {parts} parts' * (parts > 1)}"
    return f"{words}: {', '.join(call.kernel for call in made.kernels)}", config


def refusal(name: str, asked: Asked) -> str | None:
    """Return why a peer is not called for a problem; None if it is. Whether it is there is not asked."""
    problem, operation = asked
    full = f"{name}.{problem.dtype}" if operation == FORWARD else f"{name}.backward.{problem.dtype}"
    judged = {kernel.name: kernel for kernel in kernels()}.get(full)
    if judged is None:
        return f"its dtype must be {' or '.join(PEERS[name].dtypes)}"
    if PEERS[name].serves:  # what it takes beside what verify judges it on, within the bound of any order
        features = judged.features | {"window", "softcap", "head_dim_v", "attention_chunk"}
        judged = replace(judged, head_dims=None, features=features).altered(configure=lambda problem: None)
    return judged.refusal(problem)
