"""Kernels as they are timed: launches that take random operands on the GPU in turn, of ours and of its peers.

What a kernel returns is checked before it is timed, by :mod:`fa3verify.bench.check`; one that is wrong has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from fa3_kernels.gluon.arguments import NO_DESCALES, Descales
from fa3_kernels.gluon.launch import forward
from fa3_kernels.plan.families import OURS
from fa3_kernels.plan.request import Choices, Semantics
from fa3_reference.problem import AttentionProblem
from fa3_simulator.launch import flops
from fa3_simulator.run import in_words
from fa3verify.bench import check, graphs
from fa3verify.files import Json
from fa3verify.known import launches, peer_kernels
from fa3verify.known.launches import Given, LaunchOutput
from fa3verify.known.libraries import Unsupported
from fa3verify.known.peers import PEERS
from fa3verify.tensors.convert import TORCH_DTYPES
from fa3verify.text import one_line
from fa3verify.timed import timing

MAX_COPIES = 3  # sets of inputs used in turn, so that a launch does not find its operands in the L2 cache

# A kernel, prepared for a problem and sets of operands: ``launch(i)`` takes the sets in turn, and ``judge(output)``
# says in words what is wrong with an output of the first set, in an empty text if nothing is.
Prepared = tuple[Callable[[int], LaunchOutput], Callable[[LaunchOutput], str]]
Prepare = Callable[[AttentionProblem, Sequence[Given]], Prepared]  # ValueError for a problem that it does not take


class Attempt(NamedTuple):
    """Says what came of the attempt to time a kernel: bursts if it was timed, else the reason why not.

    It is "wrong" if its output did not pass the check, and "failed" if it raised another error.
    """

    status: Literal["timed", "refused", "missing", "failed", "wrong"]
    reason: str = ""
    bursts: Sequence[timing.LaunchTime] = ()


def draw(problem: AttentionProblem, copies: int, seed: int, v_mean: float = 0.0) -> list[Given]:
    """Draw sets of N(0, 1) operands on the GPU, V with mean ``v_mean``; e4m3 operands are scaled to an amax of 448."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape_of_factors = (problem.batch, problem.nheads_kv)
    drawn = []
    for _ in range(copies):
        tensors = []
        factors = []
        for shape, mean in ((problem.q_shape, 0.0), (problem.k_shape, 0.0), (problem.v_shape, v_mean)):
            x = torch.randn(shape, device="cuda", dtype=torch.float32, generator=generator) + mean
            if problem.dtype == "e4m3":
                factor = float(x.abs().max()) / 448
                x = x / factor
                factors.append(torch.full(shape_of_factors, factor, dtype=torch.float32, device=x.device))
            tensors.append(x.to(TORCH_DTYPES[problem.dtype]))
        drawn.append(Given(*tensors, *factors))
    return drawn


def our_launch(problem: AttentionProblem, inputs: Sequence[Given], choices: Choices) -> Callable[..., tuple]:
    """Return ``launch(i)`` of our forward, which takes the inputs in turn, and keywords such as ``stamps``."""
    factors = [NO_DESCALES if x.q_descale is None else Descales(*x[3:6]) for x in inputs]
    semantics = Semantics.of(problem)

    def launch(i: int, **more: Any) -> tuple:
        x = inputs[i % len(inputs)]
        factor = factors[i % len(inputs)]
        return forward(x.q, x.k, x.v, semantics, choices, descales=factor, **more)

    return launch


def ours(choices: Choices, problem: AttentionProblem, inputs: Sequence[Given]) -> Prepared:
    """Prepare our kernel, whose last row tiles must have the bits of the twin; ValueError for what it does not take."""
    config = choices.config(problem, torch.cuda.get_device_properties(0).multi_processor_count)
    launch = our_launch(problem, inputs, choices)
    return lambda i: LaunchOutput(*launch(i)), partial(check.wrong_bits, problem, inputs[0], config)


def peer(name: str, problem: AttentionProblem, inputs: Sequence[Given]) -> Prepared:
    """Prepare a peer, whose first and last rows must be within the bound of the order of operations that it states.

    ValueError for a problem that it does not claim to take; Unsupported where it is missing.
    """
    judged = {kernel.name: kernel for kernel in peer_kernels.kernels()}.get(f"{name}.{problem.dtype}")
    if reason := judged.refusal(problem) if judged else f"its dtype must be {' or '.join(PEERS[name].dtypes)}":
        raise ValueError(reason)
    options = {"num_splits": 0} if "num_splits" in PEERS[name].choices else {}
    model = PEERS[name].model(PEERS[name].configure(problem, **options))
    prepared = [launches.loaded(name)(problem, x, {"lse": False, **options}) for x in inputs]
    return lambda i: prepared[i % len(prepared)](), partial(check.outside_bound, problem, inputs[0], model)


def measured(problem: AttentionProblem, kernels: Mapping[str, Prepare]) -> dict[str, Attempt]:
    """Check kernels on N(0, 1) operands, and time those that are right in interleaved cool bursts of CUDA graphs.

    The attempts are in the order of ``kernels``. RuntimeError if one of them ended the CUDA context.
    """
    inputs = draw(problem, MAX_COPIES, 0)
    ready = {name: _ready(problem, inputs, prepare) for name, prepare in kernels.items()}
    runs = {name: run for name, run in ready.items() if not isinstance(run, Attempt)}
    times = timing.measure(runs, timing.Pace(), timing.Clock())
    return {n: x if isinstance(x, Attempt) else Attempt("timed", bursts=times[n].bursts) for n, x in ready.items()}


def _ready(problem: AttentionProblem, inputs: Sequence[Given], prepare: Prepare) -> graphs.GraphTimed | Attempt:
    """Return a kernel whose output is right, captured in a graph; of any other one why it is not timed."""
    status = "refused"  # what a ValueError means before there is an output; then a shape or dtype is wrong
    try:
        launch, judge = prepare(problem, inputs)
        output = launch(0)
        status = "wrong"
        if wrong := judge(output):
            return Attempt("wrong", wrong)
        timed = graphs.GraphTimed(launch)
        timed.time(timing.LAUNCHES, timing.no_probe)
        return timed
    except (ValueError, Unsupported) as error:
        return Attempt("missing" if isinstance(error, Unsupported) else status, one_line(error))
    except Exception as error:  # a library may raise anything
        torch.cuda.synchronize()  # raises where the context is lost
        return Attempt("failed", one_line(f"{type(error).__name__}: {error}"))


def speeds(problem: AttentionProblem, names: Sequence[str]) -> Json:
    """Check and time kernels on a problem, each with as many parts of the keys as it chooses from the shape.

    Parameters
    ----------
    problem : AttentionProblem
    names : sequence of str
        Keys of :data:`fa3verify.known.peers.PEERS`, and "gluon" for our kernel.

    Returns
    -------
    dict
        What ``bench --json`` writes. Of a kernel that was not timed, milliseconds, TFLOP/s and MHz are NaN, as is
        ``times_ours``, its time over that of our kernel, where ours was not timed.
    """
    found = measured(
        problem,
        {name: partial(ours, Choices(num_splits=0)) if name == OURS else partial(peer, name) for name in names},
    )
    ms = {name: timing.median(burst.ms for burst in each.bursts) for name, each in found.items()}
    kernels = [
        {
            "kernel": name,
            "status": each.status,
            "reason": each.reason,
            "milliseconds": ms[name],
            "tflops": flops(problem, problem.head_dim) / ms[name] / 1e9,
            "times_ours": ms[name] / ms.get(OURS, float("nan")),
            "sm_mhz": timing.median(burst.sm_mhz for burst in each.bursts),
            "bursts_ms": [burst.ms for burst in each.bursts],
        }
        for name, each in found.items()
    ]
    return {"problem": in_words(problem), "gpu": torch.cuda.get_device_name(), "kernels": kernels}
