"""Cases that are recorded of a released kernel: shapes, masks, packing, splits and lengths that it takes by itself.

Drawn the same on every machine: seeds count the cases. Long ones, which make up the volume, stand last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle
from typing import Any

from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.quantize import QuantScheme
from fa3verify.cases.case import Case
from fa3verify.inputs.edits import Edit
from fa3verify.inputs.recipe import FAMILIES, Recipe, Tensor

Sizes = tuple[int, int, int, int, int]  # batch, nheads, nheads_kv, seqlen_q, seqlen_k
SHAPES: tuple[Sizes, ...]
SHAPES = ((2, 4, 2, 300, 517), (1, 2, 1, 129, 129), (1, 3, 1, 640, 777), (1, 2, 2, 64, 1400), (2, 6, 1, 211, 211))
FACTORS = (QuantScheme("head"), QuantScheme("tensor"), QuantScheme("head", hadamard_seed=0))
LENGTHS = (
    ((1, 200, 64, 130), (300, 200, 1, 700)),
    ((129, 0, 511, 1, 1), (129, 40, 511, 1, 900)),
    ((257,), (1025,)),
    ((1, 1, 1, 1, 1, 1), (17, 128, 129, 1000, 1, 300)),
)
WINDOWS = ((200, 0), (90, 150), (250, -1), (-1, 40), (0, 0), (17, 3))


def _set(tensor: Tensor, pos: int, value: float) -> Edit:
    return Edit("set", tensor, pos=pos, channel=3, value=value)


_NAN = float("nan")
_INF = float("inf")
_EDITS = (
    (_set("v", 40, _NAN),),
    (_set("q", 5, _NAN), _set("v", 7, _INF)),
    (_set("k", 100, _INF), _set("q", 9, -_INF)),
    (_set("k", 3, _NAN),),
)
# What the cases of softcap and of two head_dims hide; packed sequences have another window.
_MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (90, 30)})


class Draws:
    """Recipes in turn, each with a seed of its own."""

    def __init__(self, first: int) -> None:
        self.seeds = count(first)
        self.families = cycle([family for family in FAMILIES if family.name != "activations"])
        self.schemes = cycle(FACTORS)

    def case(self, library: str, problem: AttentionProblem, recipe: Recipe | None = None, **options: Any) -> Case:
        """A case with the next recipe, unless one is given."""
        seed = next(self.seeds)
        if recipe is None:
            family = next(self.families)
            recipe = Recipe(family.distribution, family.params, seed)
        scheme = None
        if problem.dtype == "e4m3":
            scheme = next(self.schemes)
            if problem.head_dim & (problem.head_dim - 1) and scheme.hadamard_seed is not None:
                scheme = FACTORS[0]
        return Case(f"{library}.{problem.dtype}", problem, recipe, scheme, tuple(sorted(options.items())))


def _masks(library: str) -> list[dict[str, Any]]:
    """Dense and causal; for FlashAttention-3 also windows, which some of its builds refuse."""
    found: list[dict[str, Any]] = [{}, {"causal": True}]
    if library.startswith("flash3"):
        found += [{"window": window} for window in WINDOWS]
    return found


def _head_dims(library: str, dtype: Dtype) -> tuple[int, ...]:
    if library == "flash2":
        return (32, 40, 64, 80, 96, 128, 160, 192, 224, 256)
    if library == "cudnn":
        return (64, 128, 256, 32, 40, 72, 96, 112, 160, 192)
    return (64, 96, 128, 192, 256, *((80, 112, 160) if dtype == "e4m3" else (40, 72, 104, 160, 224)))


def _fitting(library: str, sizes: Sizes, hides_keys: bool) -> Sizes:
    """Sizes with as many keys as queries under a causal mask, which torch aligns top-left where it lets one."""
    return (*sizes[:4], sizes[3]) if hides_keys and not library.startswith("flash3") else sizes


def _basic(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Every head_dim and mask, each with shapes of its own, empty rows and one query among them."""
    shapes = cycle(SHAPES)
    for head_dim in _head_dims(library, dtype):
        for mask in _masks(library):
            for _ in range(3 if head_dim in (64, 128, 256) else 2):
                sizes = _fitting(library, next(shapes), bool(mask))
                yield draws.case(library, AttentionProblem(*sizes, head_dim, dtype=dtype, **mask))
            yield draws.case(library, AttentionProblem(2, 4, 2, 1, 901, head_dim, dtype=dtype, **mask))
        yield draws.case(library, AttentionProblem(1, 2, 1, 300, 100, head_dim, dtype=dtype, causal=True))
        yield draws.case(library, AttentionProblem(1, 2, 1, 100, 300, head_dim, dtype=dtype, causal=True))
        yield draws.case(library, AttentionProblem(1, 2, 1, 70, 33, head_dim, dtype=dtype, softmax_scale=1.0))
        yield draws.case(library, AttentionProblem(1, 2, 2, 150, 400, head_dim, dtype=dtype, softmax_scale=0.003))


def _extremes(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """NaN and Inf in 16 bits; descales whose product is subnormal or zero; values and weights that are subnormal."""
    for head_dim in (64, 128, 256):
        problem = AttentionProblem(1, 2, 1, 140, 330, head_dim, dtype=dtype)
        if dtype != "e4m3":
            for edits in _EDITS:
                yield draws.case(library, problem, Recipe("normal", seed=next(draws.seeds), edits=edits))
        for std in (1e-7, 1e-16, 3e-17, 1.3e-17, 1e-17, 3e-18, 1e-19, 1e-25):
            yield draws.case(library, problem, Recipe("normal", {"std": std}, next(draws.seeds)))
        for name in ("tiny", "subnormals", "huge", "cancelling_v"):
            for _ in range(2):
                yield draws.case(library, problem, Recipe(name, {}, next(draws.seeds)))


def _packed_heads(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """PackGQA on, off and as the library chooses; splits, also as it chooses."""
    groups = cycle(((4, 2), (6, 2), (8, 1), (28, 2), (12, 3), (48, 1), (2, 2)))
    causal = {"causal": True}
    shapes: list[tuple[int, int, dict[str, Any]]]
    shapes = [(1, 900, {}), (70, 333, causal), (130, 520, {"window": (100, 0)}), (5, 2000, causal)]
    split_shapes = [*shapes, (1, 4100, {}), (300, 1100, causal), (200, 40, causal)]
    for head_dim in (64, 96, 128, 192, 256):
        for m, n, mask in [*shapes, (200, 700, {})]:
            for pack in (True, False, None):
                problem = AttentionProblem(2, *next(groups), m, n, head_dim, dtype=dtype, **mask)
                yield draws.case(library, problem, pack_gqa=pack)
        for m, n, mask in split_shapes:
            for splits in (2, 3, 5, 16, 0):
                problem = AttentionProblem(2, *next(groups), m, n, head_dim, dtype=dtype, **mask)
                yield draws.case(library, problem, num_splits=splits)


def _other(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Softcap, two head_dims, packed sequences."""
    for head_dim in (64, 96, 128, 192, 256):
        for mask in _MASKS:
            for cap in (20.0, 5.0):
                sizes = (1, 4, 2, 200, 500, head_dim)
                yield draws.case(library, AttentionProblem(*sizes, dtype=dtype, softcap=cap, **mask))
        for lengths in LENGTHS:
            masks: tuple[dict[str, Any], ...] = (*_MASKS[:2], {"window": (100, 5)})
            for mask in masks:
                problem = AttentionProblem.varlen(
                    *lengths, nheads=4, nheads_kv=2, head_dim=head_dim, dtype=dtype, **mask
                )
                yield draws.case(library, problem)
                yield draws.case(library, problem, pack_gqa=False)
                yield draws.case(library, problem, num_splits=3)
    for mask in _MASKS:
        for head_dim, head_dim_v in ((192, 128), (160, 104), *(((64, 256),) if dtype != "e4m3" else ())):
            for sizes in SHAPES[:3]:
                problem = AttentionProblem(*sizes, head_dim, head_dim_v, dtype=dtype, **mask)
                yield draws.case(library, problem)
                yield draws.case(library, problem, num_splits=3)


def _torch_varlen(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Packed sequences, and few queries over many keys, which FlashAttention-2 splits."""
    for head_dim in (64, 128, 256):
        for lengths in LENGTHS:
            problem = AttentionProblem.varlen(*lengths, nheads=4, nheads_kv=2, head_dim=head_dim, dtype=dtype)
            yield draws.case(library, problem)
    for head_dim in (64, 96, 128, 256):
        for sizes in ((1, 4, 4, 1, 4100), (2, 8, 2, 1, 2050), (1, 2, 2, 64, 8200), (1, 1, 1, 200, 5000)):
            yield draws.case(library, AttentionProblem(*sizes, head_dim, dtype=dtype))


def _volume(library: str, dtype: Dtype, draws: Draws, rounds: int) -> Iterator[Case]:
    """Long sequences of every family."""
    head_dims = (128, 64, 256, 96, 192) if library == "flash3" else (128, 64, 256)
    for i in range(rounds):
        for head_dim in head_dims:
            for causal in (False, True):
                sizes = ((1, 8, 2, 4096, 4096), (2, 4, 4, 2048, 2048), (4, 8, 2, 1000, 5000))[i % 3]
                sizes = _fitting(library, sizes, causal)
                yield draws.case(library, AttentionProblem(*sizes, head_dim, dtype=dtype, causal=causal))


def cases(library: str, dtypes: tuple[str, ...], rounds: int) -> list[Case]:
    """Cases of a library, the short ones first; ``rounds`` says how many long ones."""
    short: list[Case] = []
    long: list[Case] = []
    for i, dtype in enumerate(("fp16", "bf16", "e4m3")):
        if dtype not in dtypes:
            continue
        draws = Draws(1_000_000 * (i + 1))
        kinds = [_basic, _extremes]
        kinds += {"flash3": [_packed_heads, _other], "flash2": [_torch_varlen], "cudnn": []}.get(library, [])
        for kind in kinds:
            short += kind(library, dtype, draws)
        long += _volume(library, dtype, draws, rounds)
    return short + long
