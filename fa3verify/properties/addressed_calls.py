"""Calls of a kernel whose outputs name addresses: which small ones properties ask, and what is due of each.

Right gradients name the places that they were read from as well. Where a row has one key, its gradients by Q and K are
0. So keys come in pairs, and a row attends to the two of a pair equally: P = 1/2, and dS = dO (V1 - V2) / 4 and its
negative. Half of the channels hold the code of the pair, in which the scores are; in the others Q is 0 and K a whole
number of the key's own. So dQ = dS (K1 - K2) names the keys, dK = dS Q the rows, and dV = dO / 2 rows and channels. A
row that sees one key of its pair has dS = 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3verify.files import Json
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs, WrongOutput
from fa3verify.operations.backward import LSE_GRADIENT
from fa3verify.properties.addresses import (
    TABLE,
    Addressed,
    addressed,
    as_lse,
    codebook,
    lengths_of,
    loudness,
    mixed,
    positions,
    seen_by_rows,
)
from fa3verify.properties.ladder import batched, cached, ladders, packed, place, rotated
from fa3verify.properties.law import KernelError, Setup

_WHOLE = 4  # whole numbers of K and V are below it
_TELLING = 4  # one in so many channels of dO is 1 or -1, the others are 0
_RELATIVE = 2.0**-5  # of the sizes that a gradient adds up: roundings of P, dS and the sum are far below


def addressed_gradients(
    problem: AttentionProblem, *, seed: int = 0, alike: str = "", of_lse: bool = False
) -> Addressed:
    """Return a call for gradients whose outputs name addresses.

    Parameters
    ----------
    problem : AttentionProblem
        Without softcap, terms, sinks, ``qv`` and a cache, of 16 or 32 bits.
    seed : int
        Seed of the operands.
    alike : str
        "dout" for a dO that is 1 everywhere, so that it may be expanded.
    of_lse : bool
        Whether lse has a gradient, too: a whole number for each row.
    """
    lengths_k = lengths_of(problem)[1]
    of, row, first, visible = seen_by_rows(problem)
    owner, place = positions(lengths_k)
    heads, heads_kv = np.arange(problem.nheads), np.arange(problem.nheads_kv)
    kv = heads // problem.group
    channels, width = problem.head_dim, problem.head_dim_v
    pairs = max(1, (int(lengths_k.max()) + 1) // 2)
    codes = codebook(pairs, half := max((pairs - 1).bit_length(), channels // 2))
    turns = mixed(seed, np.arange(problem.batch)[:, None], heads_kv) % pairs
    own = mixed(seed + 1, owner[:, None], place[:, None], heads_kv) % TABLE
    table = np.random.default_rng(seed).integers(0, _WHOLE, (TABLE, channels + width)).astype(np.float32)
    k = np.empty((*own.shape, channels), np.float32)
    k[..., :half] = codes[(place[:, None] // 2 + turns[owner]) % pairs]
    k[..., half:] = table[own, half:channels]
    v = table[own, channels:]
    number = row[:, None] * problem.group + heads % problem.group
    target = first + (number + number // 7 + mixed(seed + 2, of[:, None], heads)) % np.maximum(visible, 1)
    loud = loudness(problem, pairs, half)
    sizes = loud * (4 + mixed(seed + 3, of[:, None], row[:, None], heads) % 4) / 4
    q = np.zeros((len(of), problem.nheads, channels), np.float32)
    q[..., :half] = codes[(target // 2 + turns[of][:, kv]) % pairs] * sizes[..., None]
    signs = mixed(seed + 4, of[:, None], row[:, None], heads)[..., None] >> np.arange(width) % 30
    tells = (np.arange(width) + row[:, None, None] + heads[:, None]) % _TELLING == 0
    dout = np.ones(signs.shape, np.float32) if alike else np.where(tells, signs % 2 * 2 - 1, 0).astype(np.float32)
    ends = (np.cumsum(lengths_k) - lengths_k)[of][:, None]
    one = target // 2 * 2
    keys = np.stack([one, one + 1])
    seen = (keys >= first) & (keys < first + visible)
    tokens = np.where(seen, keys + ends, 0)
    dlse = number % 5 - 2.0 if of_lse else None
    return _call(problem, (q, k, v, dout, dlse), tokens, seen, sizes * half * problem.softmax_scale)


def _call(
    problem: AttentionProblem, arrays: tuple[Any, ...], tokens: np.ndarray, seen: np.ndarray, scores: np.ndarray
) -> Addressed:
    """Return the call whose rows attend to two tokens, (2, queries, nheads), those of them that are ``seen``."""
    q, k, v, dout, dlse = arrays
    kv = np.arange(problem.nheads) // problem.group
    count = seen.sum(0)
    p = seen / np.maximum(count, 1)
    values, keys = v[tokens, kv], k[tokens, kv]
    out = (p[..., None] * values).sum(0)
    through = (dout * values).sum(-1) - (dout * out).sum(-1) + (0 if dlse is None else dlse)
    ds = p * through * problem.softmax_scale
    terms = {
        "dq": ds[..., None] * keys,
        "dk": ds[..., None] * q,
        "dv": p[..., None] * dout,
    }
    due: Outputs = {"dq": terms["dq"].sum(0)}
    sizes: Outputs = {"dq": np.abs(terms["dq"]).sum(0)}
    for name, x in (("dk", k), ("dv", v)):
        due[name], sizes[name] = np.zeros(x.shape), np.zeros(x.shape)
        np.add.at(due[name], (tokens, kv), terms[name])
        np.add.at(sizes[name], (tokens, kv), np.abs(terms[name]))
    shapes = {"dq": problem.q_shape, "dk": problem.k_shape, "dv": problem.v_shape}
    dtype = FORMATS[problem.dtype].dtype
    lse = np.where(count > 0, scores + np.log(np.maximum(count, 1)), -np.inf).astype(np.float32)
    given_shapes = (*shapes.values(), problem.out_shape, problem.out_shape)
    q, k, v, dout, out = (x.astype(dtype).reshape(of) for x, of in zip((*arrays[:4], out), given_shapes, strict=True))
    of_lse = None if dlse is None else as_lse(problem, np.broadcast_to(dlse, lse.shape).astype(np.float32))
    largest = {name: float(size.max(initial=0)) for name, size in sizes.items()}
    return Addressed(
        problem,
        BackwardOperands(q, k, v, dout=dout, out=out, lse=as_lse(problem, lse), dlse=of_lse),
        {name: due[name].reshape(shape).astype(np.float32) for name, shape in shapes.items()},
        {
            name: (_RELATIVE * sizes[name] + 2.0**-10 * min(1.0, largest[name])).reshape(shape)
            for name, shape in shapes.items()
        },
    )


_NEAR = 2.0**-5  # of the largest output, by which two runs of one call may differ where no address is known


class Stopwatch:
    """Seconds of work since it was made: of this process, or where that waits for others a quarter of those that have
    passed, so that a busy machine asks a kernel as much as an idle one.
    """

    def __init__(self) -> None:
        self._began = time.process_time(), time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.process_time() - self._began[0], (time.monotonic() - self._began[1]) / 4)


def is_addressable(kernel: Kernel, problem: AttentionProblem) -> bool:
    """Tell whether outputs for a problem can name addresses: not under a softcap, with a term, or with keys in FP8 that
    share descales otherwise than by head.

    Gradients cannot where a row may see no key, as some kernels weigh all keys alike there.
    """
    is_plain = not (problem.softcap or problem.term or problem.qv or problem.top_left or kernel.mods)
    is_seeing = all(seq.seqlen_k >= max(1, seq.seqlen_q * problem.causal) for seq in problem.sequences())
    is_stored = problem.cache is None or problem.cache.fp8 in ("", "head")
    return is_plain and is_stored and (kernel.operation == "forward" or is_seeing)


def is_asked(kernel: Kernel) -> bool:
    """Tell whether a kernel takes calls whose outputs name addresses."""
    return bool(ladders(kernel)) and kernel.operation in ("forward", "backward")


def calls(kernel: Kernel) -> tuple[AttentionProblem, ...]:
    """Return small problems of each kind that a kernel is handed: batched and packed, of as many queries as keys and of
    fewer, of one key, over pages and rows, with new keys and rotary positions.
    """
    is_causal = "causal" in kernel.features
    of_cache: tuple[tuple[str, Json], ...] = (
        ("paged", {}),
        ("seqused_k", {"page_size": 0}),
        ("append", {"new": (3, 2)}),
        ("fp8_cache", {"fp8": "head"}),
        ("leftpad", {"leftpad": (3, 40), "page_size": place(kernel, 1)}),
        ("batch_idx", {"indexed": True, "page_size": place(kernel, 0)}),
    )
    makers: tuple[tuple[str, Callable[[], AttentionProblem]], ...] = (
        ("", lambda: batched(kernel, causal=is_causal)),
        ("", lambda: batched(kernel, queries=7, keys=7, group=1)),
        ("", lambda: batched(kernel, queries=1, keys=1, group=1)),
        ("varlen", lambda: packed(kernel, (3, 1, 5), (9, 4, 19), causal=is_causal)),
        ("varlen", lambda: packed(kernel, (4, 6), (4, 6), group=2)),
        *((name, partial(cached, kernel, (2, 2), (37, 20), **of)) for name, of in of_cache),
        ("rotary", lambda: rotated(kernel, (37, 20))),
    )
    problems = []
    for name, make in makers:
        with contextlib.suppress(ValueError):
            if not name or name in kernel.features:
                problems.append(kernel.fitted(make()))
    return tuple(dict.fromkeys(problem for problem in problems if kernel.supports(problem)))


def call_of(kernel: Kernel, problem: AttentionProblem, *, seed: int = 0, alike: str = "") -> tuple[Setup, Addressed]:
    """Return a call whose outputs name addresses, and what is due.

    Where scores are changed, by a softcap or a function of the kernel, no address is known: what is due is then what
    the same call returns first.
    """
    if kernel.operation == "backward":
        found = addressed_gradients(problem, seed=seed, alike=alike, of_lse=LSE_GRADIENT in kernel.features)
    else:
        found = addressed(problem, seed=seed, alike=alike, is_coarse=bool(kernel.quantises.said))
    setup = Setup(kernel, problem, found.operands, kernel.configured(problem))
    if is_addressable(kernel, problem):
        return setup, found
    due = {name: x.astype(np.float32) for name, x in setup.run().items()}
    largest = {name: np.abs(x).max(initial=0, where=np.isfinite(x)) for name, x in due.items()}
    allowed = {name: np.full(x.shape, _NEAR * largest[name]) for name, x in due.items()}
    return setup, Addressed(problem, found.operands, due, allowed)


def is_refusal(error: KernelError) -> bool:
    """Tell whether a call failed because the kernel refuses it, as libraries do by a RuntimeError, or lacks memory.

    An error of the GPU is none, and neither is an output that is not as declared.
    """
    cause = error.__cause__
    return isinstance(cause, Exception) and not isinstance(cause, WrongOutput) and "CUDA error" not in str(cause)
