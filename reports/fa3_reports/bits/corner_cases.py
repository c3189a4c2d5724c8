"""Cases that decide what broad ones leave open: no key at all, scores of -inf, weights below 2^-126, one query, splits.

Seeds lie apart from those of :mod:`fa3_reports.bits.recorded_cases`, so that neither set moves the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.bits.recorded_cases import Draws
from fa3verify.cases.case import Case
from fa3verify.inputs.edits import Edit
from fa3verify.inputs.recipe import FAMILIES, Recipe

FIRST_SEED = 5_000_000  # plus a million for every dtype
_INF = float("inf")
_CAUSAL: dict[str, Any] = {"causal": True}
Lengths = tuple[tuple[int, ...], tuple[int, ...]]
# Many and long, one long among short, no query or no key in some.
_LONG: tuple[Lengths, ...] = (
    ((1,) * 8, (4100, 300, 2000, 8000, 1, 129, 700, 5000)),
    ((1,) * 40, tuple(100 + 211 * i for i in range(40))),
    ((64, 1, 200, 17), (6000, 3000, 9000, 128)),
    ((1, 130, 0, 300, 5, 64), (9000, 130, 200, 0, 5, 64)),
    ((300,) * 12, (1500,) * 12),
    ((2,) * 70, tuple(64 + (i * 977) % 1500 for i in range(70))),
)


def no_keys(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """No sequence has a key, or some have none."""
    for head_dim in (64, 128):
        yield draws.case(library, AttentionProblem(2, 4, 2, 130, 0, head_dim, dtype=dtype))
        yield draws.case(library, AttentionProblem(2, 4, 2, 130, 0, head_dim, dtype=dtype, causal=True))
        if library in ("flash3", "flash2"):
            for lengths in (((100, 3), (0, 0)), ((100, 3, 140), (0, 200, 0))):
                for mask in ({}, _CAUSAL):
                    sizes = {"nheads": 4, "nheads_kv": 2, "head_dim": head_dim}
                    yield draws.case(library, AttentionProblem.varlen(*lengths, **sizes, dtype=dtype, **mask))


def _infinite_scores(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Keys that are all alike, with one infinite channel: half of the queries have -inf everywhere, half +inf.

    In a second set the leftmost key is finite, so that rows of -inf end with a number; in a third only some keys are
    infinite.
    """
    if dtype == "e4m3":  # which has no infinity
        return
    alike = Edit("scale_channel", "k", channel=3, value=_INF)
    finite = Edit("set", "k", pos=0, channel=3, value=0.5)
    few = tuple(Edit("set", "k", pos=pos, channel=3, value=_INF) for pos in (700, 699, 500, 130, 1))
    masks: list[dict[str, Any]] = [{}, _CAUSAL, *([{"window": (300, 40)}] if library == "flash3.dew" else [])]
    for head_dim, mask, edits in product((64, 128, 256), masks, ((alike,), (alike, finite), few)):
        distribution, params = ("normal", {}) if edits is few else ("ties", {"distinct": 1})
        recipe = Recipe(distribution, params, next(draws.seeds), edits)
        yield draws.case(library, AttentionProblem(1, 1, 1, 300, 720, head_dim, dtype=dtype, **mask), recipe)
        recipe = Recipe(distribution, params, next(draws.seeds), edits)
        yield draws.case(library, AttentionProblem(1, 2, 1, 40, 9000, head_dim, dtype=dtype), recipe)


def _tiny_weights(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Queries that point at one key of value 0, so that the weights of others, near 2^-126 and below, are all of O.

    Weights of bf16 go down to 2^-133; those of fp16 and e4m3 are 0 there in every kernel.
    """
    if dtype != "bf16":
        return
    for head_dim, source, keys in product((64, 128, 256), (5, 400, 695), (700, 3000)):
        needles = tuple(
            Edit("needle", "q", pos=pos, source=source, value=value)
            for pos, value in zip((0, 9, 70, 130, 199), (86.0, 89.0, 90.5, 92.0, 95.0), strict=True)
        )
        silent = (Edit("constant_row", "v", pos=source), Edit("scale_channel", "v", channel=3, value=1e30))
        recipe = Recipe("normal", {}, next(draws.seeds), (*needles, *silent))
        yield draws.case(library, AttentionProblem(1, 2, 1, 200, keys, head_dim, dtype=dtype), recipe)


def _unequal(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Causal masks over unequal lengths, also of packed sequences, and over parts of several key blocks."""
    sizes = ((2, 4, 2, 300, 517), (1, 3, 1, 640, 201), (1, 2, 1, 129, 1400), (2, 8, 2, 5, 2050), (1, 1, 1, 1000, 990))
    for head_dim, shape in product((64, 96, 128, 256), sizes):
        yield draws.case(library, AttentionProblem(*shape, head_dim, dtype=dtype, causal=True))
    for head_dim, shape in product(
        (64, 128, 256), ((1, 1, 1, 2048, 2048), (1, 2, 1, 1024, 3000), (1, 1, 1, 700, 6000))
    ):
        yield draws.case(library, AttentionProblem(*shape, head_dim, dtype=dtype, causal=True))
    if library == "flash2":
        for head_dim, lengths in product((64, 128), (((1, 200, 64, 130), (300, 200, 1, 700)), ((257, 3), (1025, 0)))):
            packed = {"nheads": 4, "nheads_kv": 2, "head_dim": head_dim, "dtype": dtype}
            yield draws.case(library, AttentionProblem.varlen(*lengths, **packed, causal=True))


def _one_query(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """One query over keys that fill tiles and do not, plain inputs first: what a hypothesis is tested on."""
    for head_dim, keys in product((64, 128), (1, 2, 16, 64, 65, 128, 129, 256, 300, 512, 1025, 4096)):
        recipe = Recipe("normal", {}, next(draws.seeds))
        yield draws.case(library, AttentionProblem(1, 2, 2, 1, keys, head_dim, dtype=dtype), recipe)
        yield draws.case(library, AttentionProblem(2, 8, 2, 1, keys, head_dim, dtype=dtype))


def _own_splits(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Packed sequences, many and long, with the library's own number of splits for each."""
    groups = cycle(((8, 2), (4, 4), (16, 1), (2, 1), (3, 1)))
    for head_dim, lengths, mask in product((64, 128, 256), _LONG, ({}, _CAUSAL)):
        nheads, nheads_kv = next(groups)
        sizes = {"nheads": nheads, "nheads_kv": nheads_kv, "head_dim": head_dim}
        problem = AttentionProblem.varlen(*lengths, **sizes, dtype=dtype, **mask)
        yield draws.case(library, problem, num_splits=0)


def _softcaps(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Softcap where tanh is the identity, where it is 1, with splits, packed sequences, one query, NaN and infinity."""
    names = ("normal", "very_peaky", "faint", "huge", "tiny", "outlier_channels")
    families = [family for family in FAMILIES if family.name in names]
    for head_dim, family, cap in product((64, 128, 256), families, (1e-3, 1.0, 50.0)):
        problem = AttentionProblem(1, 4, 2, 130, 400, head_dim, dtype=dtype, softcap=cap)
        yield draws.case(library, problem, family.recipe(seed=next(draws.seeds)))
    for head_dim, mask in product((64, 128, 256), ({}, _CAUSAL)):
        options = {"head_dim": head_dim, "dtype": dtype, "softcap": 15.0}
        packed = {"nheads": 4, "nheads_kv": 2, **options, **mask}
        yield draws.case(library, AttentionProblem(2, 8, 2, 1, 2050, **options, **mask))
        yield draws.case(library, AttentionProblem(1, 8, 2, 100, 2050, **options, **mask), num_splits=3)
        yield draws.case(library, AttentionProblem.varlen((1, 200, 64), (300, 200, 700), **packed))
        if dtype != "e4m3":
            edits = (Edit("set", "q", pos=5, value=_INF), Edit("set", "k", pos=40, channel=2, value=float("nan")))
            for edit in edits:
                recipe = Recipe("normal", {}, next(draws.seeds), (edit,))
                yield draws.case(library, AttentionProblem(1, 2, 1, 140, 330, **options, **mask), recipe)


_OWN = {
    "flash3": (_own_splits, _softcaps),
    "flash2": (_tiny_weights, _unequal),
    "cudnn": (_unequal, _one_query),
}


def corners(library: str, dtypes: tuple[str, ...]) -> list[Case]:
    """Cases of a library in a fixed order."""
    kinds = [no_keys, _infinite_scores, *_OWN.get(library, ())]
    found: list[Case] = []
    for i, dtype in enumerate(("fp16", "bf16", "e4m3")):
        if dtype in dtypes:
            draws = Draws(FIRST_SEED + 1_000_000 * i)
            found += [case for kind in kinds for case in kind(library, dtype, draws)]
    return found
