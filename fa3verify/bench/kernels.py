"""Kernels as they are timed: launches that take random operands on the GPU in turn, of ours and of its peers.

What a kernel returns is checked before it is timed, by :mod:`fa3verify.bench.check`; one that is wrong has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from fa3_kernels.api import get_scheduler_metadata
from fa3_kernels.gluon.arguments import NO_DESCALES, Descales, packed_of
from fa3_kernels.gluon.launch import forward
from fa3_kernels.plan.families import OURS
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import Choices, Semantics, request_for
from fa3_reference.bounds import KernelModel
from fa3_reference.problem import AttentionProblem
from fa3verify.bench import check, graphs
from fa3verify.bench.planned import refusal, told, work
from fa3verify.cases.lines import Asked
from fa3verify.files import Json
from fa3verify.known import launches
from fa3verify.known.device import prepare_served
from fa3verify.known.launches import Given, GivenBackward, Keywords, LaunchOutput, Options
from fa3verify.known.libraries import Unsupported
from fa3verify.known.peers import PEERS, Peer
from fa3verify.operations import FORWARD
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
    """Draw sets of N(0, 1) operands on the GPU, V with mean ``v_mean``; e4m3 operands are scaled to an amax of 448.

    Those of a problem with a cache are also put in their places there, once for all kernels.
    """
    packed = packed_of(problem)
    starts = {} if packed is None else {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
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
        given = Given(*tensors, *factors)._replace(**starts)
        drawn.append(given if problem.cache is None else given._replace(served=launches.placed(problem, given)))
    return drawn


def differentiated(problem: AttentionProblem, x: Given, seed: int) -> GivenBackward:
    """Return the inputs of a backward: N(0, 1) gradients of the output, and out and lse of our own forward."""
    generator = torch.Generator(x.q.device).manual_seed(seed)
    out, lse = forward(x.q, x.k, x.v, Semantics.of(problem), packed=packed_of(problem))
    dout = torch.randn(out.shape, device=x.q.device, dtype=torch.float32, generator=generator).to(out.dtype)
    return GivenBackward(q=x.q, k=x.k, v=x.v, dout=dout, out=out, lse=lse)


def our_launch(problem: AttentionProblem, inputs: Sequence[Given], choices: Choices) -> Callable[..., tuple]:
    """Return ``launch(i)`` of our forward, which takes the inputs in turn, and keywords such as ``stamps``.

    Over a cache it returns no lse, and its schedule is made here, as servers make it once for all layers of a step.
    """
    if problem.cache is not None:
        served = in_turn([_served(problem, x, choices) for x in inputs])
        return lambda i: (served(i).view(problem.out_shape), None)
    semantics = Semantics.of(problem)
    packed = packed_of(problem)
    prepared = [
        partial(
            forward,
            x.q,
            x.k,
            x.v,
            semantics,
            choices,
            descales=NO_DESCALES if x.q_descale is None else Descales(x.q_descale, x.k_descale, x.v_descale),
            packed=packed,
        )
        for x in inputs
    ]
    return in_turn(prepared)


def in_turn(prepared: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return ``launch(i)``, which takes prepared launches in turn, and their keywords."""
    return lambda i, **more: prepared[i % len(prepared)](**more)


def _served(problem: AttentionProblem, x: Given, choices: Choices) -> Callable[[], torch.Tensor]:
    """Return a launch over a cache, with its schedule."""
    assert x.served is not None and problem.cache is not None  # noqa: PT018 (of one record)
    given = {name: y for name, y in x.served.items() if name != "cu_seqlens_q" or not problem.has_equal_queries}
    options: Keywords = {name: getattr(choices, name) for name in ("num_splits", "pack_gqa")}
    schedule = get_scheduler_metadata(
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.nheads,
        problem.nheads_kv,
        problem.head_dim,
        given["cache_seqlens"],
        qkv_dtype=x.q.dtype,
        headdim_v=problem.head_dim_v,
        cu_seqlens_q=given.get("cu_seqlens_q"),
        page_size=problem.cache.page_size or None,
        causal=problem.causal,
        window_size=problem.window,
        attention_chunk=problem.attention_chunk,
        has_softcap=problem.softcap > 0,
        total_q=len(x.q),
        **options,
    )
    return prepare_served(problem, given, max_seqlen_k=problem.seqlen_k, scheduler_metadata=schedule, **options)


def ours(choices: Choices, problem: AttentionProblem, inputs: Sequence[Given]) -> Prepared:
    """Prepare our kernel, whose last row tiles must have the bits of the twin; ValueError for what it does not take."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = plan_of(request_for(problem, choices), sms).config
    launch = our_launch(problem, inputs, choices)
    return lambda i: LaunchOutput(*launch(i)), partial(check.wrong_bits, problem, inputs[0], config)


def peer(name: str, operation: str, problem: AttentionProblem, inputs: Sequence[Any]) -> Prepared:
    """Prepare a peer, whose first and last rows must be within the bound of the order of operations that it states; or
    any backward, ours as well, whose gradients must be within the bound of any order.

    ValueError for a problem that it does not claim to take; Unsupported where it is missing.
    """
    if name in PEERS and (reason := refusal(name, (problem, operation))):
        raise ValueError(reason)
    if operation != FORWARD:
        launch = in_turn([launches.loaded(name, operation)(problem, x, {}) for x in inputs])
        return launch, partial(check.outside_gradients, problem, inputs[0])
    options = {"num_splits": 0} if "num_splits" in PEERS[name].choices else {}
    model = model_of(PEERS[name], problem, options)
    return peer_launch(name, problem, inputs, options), partial(check.outside_bound, problem, inputs[0], model)


def peer_launch(
    name: str, problem: AttentionProblem, inputs: Sequence[Given], options: Options
) -> Callable[[int], Any]:
    """Return ``launch(i)`` of a peer's forward without lse; a build that serves has its schedule made here, as ours."""
    serves = PEERS[name].serves
    options = {"is_scheduled" if serves else "lse": serves, **options}
    tensors = [x.served or launches.placed(problem, x) for x in inputs] if serves else inputs
    return in_turn([launches.loaded(name)(problem, x, options) for x in tensors])


def model_of(rival: Peer, problem: AttentionProblem, options: Options) -> KernelModel:
    """Return the order of operations whose bound a peer's output must keep: its own, or any order where its family's
    twin does not know the problem.
    """
    try:
        return rival.model(rival.configure(problem, **options))
    except ValueError:
        out_dtype = "fp16" if problem.dtype == "fp16" else "bf16"
        return KernelModel.any_order(problem.dtype, out_dtype, accumulator="either")


def measured(asked: Asked, kernels: Mapping[str, Prepare]) -> dict[str, Attempt]:
    """Check kernels on N(0, 1) operands, and time those that are right in interleaved cool bursts of CUDA graphs.

    The attempts are in the order of ``kernels``. RuntimeError if one of them ended the CUDA context.
    """
    problem, operation = asked
    try:
        inputs: list[Any] = draw(problem, MAX_COPIES, 0)
        if operation != FORWARD:
            inputs = [differentiated(problem, x, i) for i, x in enumerate(inputs)]
    except (ValueError, torch.OutOfMemoryError) as error:  # too large, or none of ours has the out that is needed
        return {name: Attempt("refused", one_line(error)) for name in kernels}
    ready = {name: _ready(problem, inputs, prepare) for name, prepare in kernels.items()}
    runs = {name: run for name, run in ready.items() if not isinstance(run, Attempt)}
    bursts = timing.measure(runs, timing.Pace())
    return {n: x if isinstance(x, Attempt) else Attempt("timed", bursts=bursts[n]) for n, x in ready.items()}


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
        timed.time(timing.LAUNCHES)
        return timed
    except (ValueError, Unsupported) as error:
        return Attempt("missing" if isinstance(error, Unsupported) else status, one_line(error))
    except Exception as error:  # a library may raise anything
        torch.cuda.synchronize()  # raises where the context is lost
        return Attempt("failed", one_line(f"{type(error).__name__}: {error}"))


def speeds(asked: Asked, names: Sequence[str]) -> Json:
    """Check and time kernels on a problem, each with as many parts of the keys as it chooses from the shape.

    Parameters
    ----------
    asked : (AttentionProblem, {"forward", "backward"})
    names : sequence of str
        Of :data:`fa3verify.bench.planned.TIMED`, for this operation.

    Returns
    -------
    dict
        What ``bench --json`` writes. Of a kernel that was not timed, milliseconds, TFLOP/s and MHz are NaN, as is
        ``times_ours``, its time over that of our kernel, where ours was not timed.
    """
    own = partial(ours, Choices(num_splits=0))
    first = (OURS, FORWARD)
    found = measured(asked, {x: own if (x, asked[1]) == first else partial(peer, x, asked[1]) for x in names})
    ms = {name: timing.median(burst.ms for burst in each.bursts) for name, each in found.items()}
    kernels = [
        {
            "kernel": name,
            "status": each.status,
            "reason": each.reason,
            "milliseconds": ms[name],
            "tflops": work(asked) / ms[name] / 1e9,
            "times_ours": ms[name] / ms.get(OURS, float("nan")),
            "sm_mhz": timing.median(burst.sm_mhz for burst in each.bursts),
            "bursts_ms": [burst.ms for burst in each.bursts],
        }
        for name, each in found.items()
    ]
    return {"problem": told(asked), "gpu": torch.cuda.get_device_name(), "kernels": kernels}
