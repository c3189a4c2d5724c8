"""Cases of practice: the sizes that users launch, such as layers of public models, long rows and ragged batches.

They complement the covering array (:mod:`fa3verify.campaign.cover`), whose cases are small and stand for classes of
sizes. Query rows are few, so that long keys and many heads cost little; each row is judged in full.
:class:`fa3verify.campaign.plan.JudgePractice` judges what :func:`practice` and :func:`probes` yield.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from fa3_reference.cache import with_cache
from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.cases.dimensions import DIMENSIONS, MORE, OF_CACHES, PAGE_SIZES, Point
from fa3verify.cases.probing import every_head_dim
from fa3verify.cases.space import cache_of, place, termed, terms
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.widths import is_absorbed
from fa3verify.operations.operation import CACHES, needed_features

_FEW = 12  # models of a quick campaign
_LONGEST = {"quick": 8192, "release": 131072, "soak": 131072}  # keys of a sequence
# Elements of K: with more channels there are fewer keys. Judging 2^27 of a forward takes up to 7.4 GiB, and 2^24 of
# gradients 4.8: a worker has at least 8, and its kernel needs some of them.
_MOST_ELEMENTS = {"quick": 2**22, "release": 2**26, "soak": 2**26}
_MOST_OF_GRADIENTS = 2**24
_MOST_CHANNELS = 4096  # of K, in the share of one GPU
_RECIPES = (Recipe("normal"), Recipe("peaky"), Recipe("offset_v"))  # inputs of the cases, in turn
_VALUE_DIMS = ((192, 128), (64, 256), (128, 64), (256, 128), (40, 72), (96, 160))  # head_dim and head_dim_v
_HEADS = ((6, 1), (7, 1), (14, 2), (16, 1), (32, 2), (24, 24), (40, 8), (48, 1), (64, 8))  # nheads and nheads_kv
_SCALES = (16.0, 4.0, 2.0**-12, 2.0**-16)  # softmax_scale, far from 1 / sqrt(head_dim)
# Lengths of queries and of keys of packed batches: with empty sequences first, in the middle and last.
_RAGGED = (
    ((0, 3, 0, 5, 1, 0, 2, 7, 4, 1, 1, 0, 6, 2, 3, 1, 0), (9, 12, 5, 0, 33, 0, 17, 64, 8, 1, 0, 7, 20, 11, 2, 40, 3)),
    ((4, 1, 3, 2, 6), (0, 21, 0, 130, 9)),
    ((5, 0, 0, 2), (70, 3, 0, 129)),
)
# Calls over caches: lengths of queries and keys, heads and what else a problem has, and classes of its cache. Rows are
# longer than rotary tables of 2,048, windows than 4,096 and chunks are of 8,192, as those of public models are.
_CALLS: tuple[tuple[tuple[int, ...], tuple[int, ...], Json, Point], ...] = (
    ((4,), (2300,), {"nheads": 3, "causal": True}, {"appended": "one per query", "rotary": "whole"}),
    ((1, 1), (2100, 60), {"nheads": 2, "nheads_kv": 2}, {"appended": MORE, "rotary": "whole, interleaved"}),
    ((2,), (3000,), {"nheads": 5, "sinks": True}, {"spare": "none"}),
    ((1, 3), (5200, 40), {"nheads": 2, "window": (4999, 0)}, {"behind": "nan"}),
    ((3,), (8300,), {"nheads": 1, "causal": True, "attention_chunk": 8192}, {}),
    ((3, 1, 2), (300, 700, 77), {"nheads": 6}, {"fp8": "head"}),
    ((1, 1, 1), (1300, 2, 2600), {"nheads": 12}, {"leftpad": "over 32", "indexed": "on"}),
)
_CHEAP = OF_CACHES.keys() - {"rotary", "fp8"}  # what a layer's cache has: bounds of calls that round operands take long


@dataclass(frozen=True, slots=True)
class Model:
    """One attention layer of a public model, and where it is published.

    ``context`` is the most tokens that the model is made for. A ``head_dim_v`` of 0 is ``head_dim``; ``window`` counts
    keys with the query's own, -1 for none; a ``softmax_scale`` of None is 1 / sqrt(head_dim).
    """

    name: str
    nheads: int
    nheads_kv: int
    head_dim: int
    context: int
    source: str
    head_dim_v: int = 0
    window: int = -1
    softcap: float = 0.0
    softmax_scale: float | None = None
    causal: bool = True

    @property
    def share(self) -> Model:
        """Return the layer as a GPU serves it: one with many channels of K is served by eight, each with its heads."""
        gpus = 8 if self.nheads_kv * self.head_dim > _MOST_CHANNELS else 1
        return replace(self, nheads=self.nheads // gpus, nheads_kv=self.nheads_kv // gpus)

    def problem(self, dtype: Dtype, seqlen_q: int, longest: int) -> AttentionProblem:
        """Return the last ``seqlen_q`` queries over as many keys as the context has tokens, at most ``longest``."""
        return AttentionProblem(
            1,
            self.nheads,
            self.nheads_kv,
            seqlen_q,
            min(self.context, longest),
            self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=dtype,
            causal=self.causal and self.window < 0,  # a window ends at the diagonal, so that it needs no mask
            window=(self.window - 1, 0) if self.window >= 0 else (-1, -1),
            softcap=self.softcap,
            softmax_scale=self.softmax_scale,
        )


@cache
def models() -> tuple[Model, ...]:
    """Return the public models, as ``data/models.toml`` holds them."""
    text = (files("fa3verify") / "data" / "models.toml").read_text(encoding="utf-8")
    return tuple(Model(**row) for row in tomllib.loads(text)["model"])


def practice(kernel: Kernel, profile: str, seed: int) -> Iterator[Case]:
    """Yield the cases of practice that a kernel claims and does not refuse.

    Parameters
    ----------
    kernel : Kernel
        A forward kernel, of gradients, or a quantiser.
    profile : {"quick", "release", "soak"}
    seed : int
        Decides the inputs, and which models a quick campaign takes.
    """
    rng = np.random.default_rng([seed, 7])
    if kernel.operation == "quantize":
        yield from _quantised(kernel, profile, seed, rng)
        return
    problems = [*_layers(kernel, profile, rng), *_sizes(kernel, profile, rng), *_calls(kernel, profile, rng)]
    problems = [termed(kernel, problem, i // 2) if i % 2 else problem for i, problem in enumerate(problems)]
    for i, problem in enumerate([*problems, *_squares(kernel)]):
        problem = _fitted(kernel, problem)
        if needed_features(problem) <= kernel.features and kernel.supports(problem):
            recipe = replace(_RECIPES[i % len(_RECIPES)], seed=seed + i)
            is_split = problem.sinks and problem.cache and "num_splits" in kernel.changeable
            yield Case.plain(kernel, problem, recipe, (("num_splits", 3),) if is_split else ())


def _quantised(kernel: Kernel, profile: str, seed: int, rng: np.random.Generator) -> Iterator[Case]:
    """Yield layers of models for a quantiser, four in a quick campaign, and the sizes that its cases lack otherwise.

    Every element is judged, so that they have few tokens. Options come in turn, with seeds of the rotation's signs that
    no byte holds.
    """
    is_quick = profile == "quick"
    layers = [models()[i] for i in rng.permutation(len(models()))[: 4 if is_quick else None]]
    most = 2**16 if is_quick else 2**20
    sizes = [
        *((1, x.nheads, x.nheads_kv, 2, max(1, most // (x.nheads_kv * x.head_dim)), x.head_dim) for x in layers),
        (1, 1, 1, 3, int(rng.uniform(0.5, 1) * _LONGEST[profile]), 32),
        (1, 2, 1, 2100, 5, 32),
        (65, 2, 1, 2, 9, 32),
        (1, 128, 128, 2, 9, 32),
    ]
    problems = [
        AttentionProblem(b, nheads=h, nheads_kv=of, seqlen_q=n, seqlen_k=m, head_dim=d, dtype=kernel.dtype)
        for b, h, of, n, m, d in sizes
    ]
    problems += [
        AttentionProblem.varlen(n, m, nheads=2, nheads_kv=1, head_dim=64, dtype=kernel.dtype) for n, m in _RAGGED
    ]
    operation = operations.find(kernel.operation)
    for i, problem in enumerate(problems):
        recipe = replace(_RECIPES[i % len(_RECIPES)], seed=seed + i)
        scheme, options = operation.choices(problem, recipe, i, kernel.features, kernel.changeable)
        changes = tuple(sorted({**dict(options), "seed": 2**8 + i}.items()))
        case = Case(kernel.name, problem, recipe, scheme, changes, operation=operation.name)
        if (needed_features(problem) | case.needed_descales) <= kernel.features and kernel.supports(problem):
            yield case


def probes(kernel: Kernel) -> Iterator[Case]:
    """Yield a small case of every head_dim that a kernel takes; none for a quantiser or one that declares its own."""
    if kernel.head_dims is not None or kernel.operation == "quantize":
        return
    for i, head_dim in enumerate(every_head_dim(kernel.dtype)):
        problem = AttentionProblem(1, 1, 1, 3, 65, head_dim, dtype=kernel.dtype, causal="causal" in kernel.features)
        problem = _fitted(kernel, problem)
        if kernel.supports(problem):
            yield Case.plain(kernel, problem, Recipe("normal", seed=i))


def _layers(kernel: Kernel, profile: str, rng: np.random.Generator) -> Iterator[AttentionProblem]:
    """Yield layers of models, few in a quick campaign, else all; those with many channels have fewer keys.

    A kernel of caches gets each over a cache, with a random class of what that may have.
    """
    chosen = models()
    if profile == "quick":
        few = _FEW - bool(kernel.features & CACHES)  # which has calls of its own besides
        chosen = tuple(chosen[i] for i in rng.permutation(len(chosen))[:few])
    for i, model in enumerate(chosen):
        part = model.share
        most = _most_elements(kernel, profile) // (part.nheads_kv * part.head_dim)
        longest = min(_LONGEST[profile], max(1024, most))
        # A windowed layer has more keys than its window, as else the window would hide none.
        longest = max(longest, min(model.window + 300, _LONGEST[profile]))
        problem = part.problem(kernel.dtype, (1, 3, 2)[i % 3], longest)
        chosen = {d.name: str(rng.choice(d.classes)) for d in DIMENSIONS if d.name in _CHEAP and d.concerns(kernel)}
        if kernel.features & CACHES:
            problem = _over_cache(kernel, problem, chosen | {"cache": place(kernel, i)}, i) or problem
        yield problem


def _over_cache(kernel: Kernel, problem: AttentionProblem, chosen: Point, turn: int) -> AttentionProblem | None:
    """Return a problem over a cache of the chosen classes; None if the kernel takes no such call."""
    problem = _fitted(kernel, problem)
    with contextlib.suppress(ValueError):
        cached = kernel.fitted(with_cache(problem, cache_of(kernel, problem, chosen, turn)))
        return cached if kernel.supports(cached) else None
    return None


def _calls(kernel: Kernel, profile: str, rng: np.random.Generator) -> Iterator[AttentionProblem]:
    """Yield calls over caches, in a quick campaign once each, in pages and rows in turn, else in pages of all sizes."""
    dims = [d for d in kernel.head_dims or (64, 128) if not is_absorbed(kernel, d)]
    first = int(rng.integers(2 * len(PAGE_SIZES)))
    for i, (queries, keys, fields, chosen) in enumerate(_CALLS if kernel.features & CACHES else ()):
        sizes: Json = {"nheads_kv": 1, "head_dim": dims[i % len(dims)], "dtype": kernel.dtype, **fields}
        problem = AttentionProblem.varlen(queries, keys, **sizes)
        turns = range(first + i, first + i + (1 if profile == "quick" else 2 * len(PAGE_SIZES)))
        for where, turn in {place(kernel, turn): turn for turn in turns}.items():
            if cached := _over_cache(kernel, problem, {**chosen, "cache": where}, turn):
                yield cached


def _most_elements(kernel: Kernel, profile: str) -> int:
    """Return how many elements K may have in a case of a profile."""
    most = _MOST_ELEMENTS[profile]
    return min(most, _MOST_OF_GRADIENTS) if kernel.operation == "backward" else most


def _sizes(kernel: Kernel, profile: str, rng: np.random.Generator) -> Iterator[AttentionProblem]:
    """Yield sizes that users launch and that the covering array does not have; none if a kernel takes absorbed
    attention only.

    In turn: numbers of heads, head dims of V, scales, random and longest rows of keys, many queries over few keys, many
    sequences, a decoding batch, and ragged batches.
    """
    plain: dict[str, Any] = {"dtype": kernel.dtype}
    dims = [d for d in kernel.head_dims or (64, 128) if not is_absorbed(kernel, d)]
    if not dims:
        return
    for nheads, nheads_kv in _HEADS:
        yield AttentionProblem(1, nheads, nheads_kv, 2, 77, int(rng.choice(dims)), **plain)
    for head_dim, head_dim_v in _VALUE_DIMS:
        yield AttentionProblem(1, 2, 2, 5, 140, head_dim, head_dim_v=head_dim_v, **plain)
    for scale in _SCALES:
        yield AttentionProblem(1, 2, 2, 5, 150, int(rng.choice(dims)), softmax_scale=scale, **plain)
    for keys in np.exp(rng.uniform(np.log(300), np.log(_LONGEST[profile]), 4)).astype(int):
        yield AttentionProblem(1, 2, 1, 3, int(keys), dims[0], causal=bool(keys % 2), **plain)
    for keys in (4096, min(_LONGEST[profile], _most_elements(kernel, profile) // dims[-1])):
        yield AttentionProblem(1, 1, 1, 2, keys, dims[-1], **plain)
    yield AttentionProblem(1, 1, 1, 2100, 20, dims[0], **plain)
    yield AttentionProblem(17, 1, 1, 2, 33, dims[0], **plain)
    yield AttentionProblem(9, 4, 2, 1, 70, dims[-1], causal=True, **plain)
    for lengths_q, lengths_k in _RAGGED:
        for causal in (False, True):
            packed = {"nheads": 2, "nheads_kv": 1, "head_dim": dims[0], "causal": causal}
            yield AttentionProblem.varlen(lengths_q, lengths_k, **packed, **plain)


def _squares(kernel: Kernel) -> Iterator[AttentionProblem]:
    """Yield a problem of as many queries as keys with each term that a kernel takes."""
    (head_dim, *_) = kernel.head_dims or (64,)
    n = kernel.sizes.queries(kernel.sizes.keys(37))
    for term in terms(kernel):
        with contextlib.suppress(ValueError):
            yield AttentionProblem(2, 4, 2, n, n, head_dim=head_dim, dtype=kernel.dtype, term=term)


def _fitted(kernel: Kernel, problem: AttentionProblem) -> AttentionProblem:
    """Return a problem without the features that a kernel does not claim: causal mask, grouped heads, softcap, window.

    Sizes become those that the kernel declares. Other features, such as a head_dim of V, stay, and :func:`practice`
    leaves out problems that need one which is not claimed.
    """
    without: dict[str, Json] = {
        "causal": {"causal": False},
        "gqa": {"nheads_kv": problem.nheads},
        "softcap": {"softcap": 0.0},
        "window": {"window": (-1, -1), "causal": "causal" in kernel.features},
    }
    changes: Json = {}
    for feature in without.keys() & needed_features(problem) - kernel.features:
        changes |= without[feature]
    if not problem.is_varlen:
        of_a_key = problem.batch * changes.get("nheads_kv", problem.nheads_kv) * problem.head_dim
        # K grew if every query head has its own keys now; a worker's memory is the limit, whatever the profile.
        changes["seqlen_k"] = min(problem.seqlen_k, _most_elements(kernel, "release") // of_a_key)
    return kernel.fitted(replace(problem, **changes))
