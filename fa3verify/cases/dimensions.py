"""The dimensions of the space of cases with their classes, and the classes of a case.

A class is a range in which kernels take one path: one key, a whole tile, one key more. Lengths are those of the first
sequence, relative to the tile of the kernel's configuration, or to :data:`TILE` where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fa3_kernels.plan.quantizer import Scale, Scope
from fa3_reference.layout import Cache
from fa3_reference.problem import AttentionProblem
from fa3_reference.scales import ROUNDINGS, SHARING
from fa3_reference.score_term import BROADCAST, KINDS, VALUES
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.inputs.recipe import DISTRIBUTIONS
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.widths import head_dim_refusal
from fa3verify.operations.merge import PARTS, UNWRITTEN
from fa3verify.operations.operation import CACHES, needed_features

TILE = 128  # rows and keys of a tile in most kernels
LONG = 1024  # keys from which a row is of class "long"
HEAD_DIMS = (64, 32, 96, 128, 192, 256)  # asked of a kernel that declares none; others than 64, 128 and 256 are padded
TILES_OF_KEYS = ("a tile but one", "a tile", "a tile and one", "half a tile last", "several tiles")
Point = Mapping[str, str]  # a class by dimension
Classify = Callable[[Case, Any], str]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension: its classes, the plainest first, and ``of(case, config)``, which gives the class of a case.

    It concerns kernels of ``operation`` and ``dtype`` (None for all) that claim one of ``features`` (empty for all).
    Empty ``classes`` stand for those of the kernel, its head dims.
    """

    name: str
    classes: tuple[str, ...]
    of: Classify
    operation: str | None = None
    dtype: str | None = None
    features: frozenset[str] = frozenset()

    def concerns(self, kernel: Kernel) -> bool:
        """Tell whether kernels like this one have the dimension."""
        is_claimed = not self.features or bool(self.features & kernel.features)
        return is_claimed and self.operation in (None, kernel.operation) and self.dtype in (None, kernel.dtype)


def head_dims(kernel: Kernel) -> tuple[int, ...]:
    """Return the head_dims that a kernel declares, or if it declares none those of :data:`HEAD_DIMS` it may take."""
    if kernel.head_dims is not None:
        return tuple(kernel.head_dims)
    return tuple(d for d in HEAD_DIMS if head_dim_refusal(kernel, d) is None)


def _softcap(case: Case, config: Any) -> str:
    x = case.problem.softcap
    return "off" if not x else "above 1" if x > 1 else "at most 1"


def _first(case: Case) -> tuple[int, int]:
    """Return the number of queries and of keys of the first sequence."""
    seq = next(case.problem.sequences())
    return seq.seqlen_q, seq.seqlen_k


def _counted(name: str, field: str, steps: Mapping[int, str]) -> Dimension:
    """Return the dimension of a count of the problem, whose class is that of the last of the steps that it reaches."""
    return Dimension(
        name,
        tuple(steps.values()),
        lambda case, config: steps[max(least for least in steps if least <= getattr(case.problem, field))],
    )


# The sizes of each class, which its cases take in turn: a kernel may hold heads by the four or eight. A turn that has
# large groups has few kv heads, so that no case is costly in both.
SIZES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "batch": {"1": (1,), "2": (2,), "3 or more": (3, 5)},
    "group": {"1": (1,), "2 to 4": (2, 4), "5 or more": (5, 8)},
    "kv_heads": {"1": (1,), "2 or 3": (2, 3), "4 or more": (9, 4)},
}
PAGE_SIZES = (16, 64, 1, 128, 48, 256, 544)  # keys of a page, in turn, for a kernel that declares none
_NAMED_PAGES = (16, 64, 1, 128, 256)
MORE = "more than queries"
TURNS = 2  # the most sizes that a class has


def _queries(case: Case, config: Any) -> str:
    n = _first(case)[0]
    tile = getattr(config, "tile_m", TILE)
    if n <= 1:
        return ("none", "one")[n]
    return "part of a tile" if n < tile else "a tile" if n == tile else "several tiles"


def _keys(case: Case, config: Any) -> str:
    n = _first(case)[1]
    tile = getattr(config, "tile_n", TILE)
    named = {0: "none", 1: "one", tile - 1: "a tile but one", tile: "a tile", tile + 1: "a tile and one"}
    if n in named:
        return named[n]
    if n >= LONG:
        return "long"
    return "part of a tile" if n < tile else "half a tile last" if n % 128 == 64 else "several tiles"


def _mask(case: Case, config: Any) -> str:
    (left, right), causal = case.problem.window, case.problem.causal
    window = {(False, False): "", (True, False): "window left", (False, True): "window right"}
    words = window.get((left >= 0, right >= 0), "window both")
    return " ".join(filter(None, ("causal" * causal, words))) or "none"


def _scale(case: Case, config: Any) -> str:
    scale = case.problem.softmax_scale
    if math.isclose(scale * math.sqrt(case.problem.head_dim), 1.0):
        return "default"
    return "tiny" if scale < 0.01 else "above 1" if scale > 1 else "other"


def _layout(case: Case, config: Any) -> str:
    # Sequences of a cache differ in their keys; with equal queries the tensors are batched all the same.
    is_even = case.problem.cache is not None and case.problem.has_equal_queries
    if is_even or not case.problem.is_varlen:
        return "batched"
    others = list(case.problem.sequences())[1:]
    return "packed, some empty" if any(not s.seqlen_q or not s.seqlen_k for s in others) else "packed"


def pages(size: int) -> str:
    """Return the class of a page of so many keys; 0 stands for rows."""
    return "rows" if not size else f"pages of {size}" if size in _NAMED_PAGES else "pages of another size"


def _of_cache(of: Callable[[Case, Cache], str], without: str) -> Classify:
    """Return a classifier by a case and its cache, ``without`` where it has none."""
    return lambda case, config: of(case, case.problem.cache) if case.problem.cache else without


def _appended(case: Case, cache: Cache) -> str:
    return "none" if not cache.new else MORE if cache.new[0] > _first(case)[0] else "one per query"


def rotated_channels(problem: AttentionProblem) -> int:
    """Return how many channels a call rotates that rotates whole heads; V's part of an absorbed head is not rotated."""
    return problem.head_dim - (problem.head_dim_v if problem.qv else 0)


def _rotary(case: Case, cache: Cache) -> str:
    if not cache.rotary_dim:
        return "off"
    part = "whole" if cache.rotary_dim == rotated_channels(case.problem) else "part"
    return part + ", interleaved" * cache.interleaved


def _leftpad(case: Case, cache: Cache) -> str:
    return "none" if not cache.leftpad else "over 32" if max(cache.leftpad) > 32 else "up to 32"


def _of_term(case: Case, field: str, default: str) -> str:
    """Return a field of the term of a case's scores, ``default`` where it has none."""
    return str(getattr(case.problem.term, field, default))


def _promotion(case: Case, config: Any) -> str:
    interval = getattr(config, "promotion_interval", 0)
    return "chained" if not interval else "in parts" if interval < getattr(config, "tile_n", TILE) else "every tile"


def _descales(case: Case, config: Any) -> str:
    scheme = case.scheme
    if scheme is None or scheme.granularity != "block":
        return scheme.granularity if scheme else "none"
    rows = {scheme.rows_per_descale(operand) for operand in ("q", "k", "v")}
    return "blocks" if rows == {getattr(config, "tile_n", TILE)} else "other blocks"


def _of_scheme(field: str, default: object, words: Mapping[Any, str]) -> Classify:
    """Return a classifier by a field of the quantisation scheme, ``default`` where a case has none."""
    return lambda case, config: words[getattr(case.scheme, field, default)]


def _of_config(field: str, default: object, words: Mapping[Any, str]) -> Classify:
    """Return a classifier by a field of the configuration; a value that ``words`` lacks is its own class."""
    return lambda case, config: words.get(value := getattr(config, field, default), str(value))


SCALINGS = {name: "exact" if name == "amax" else name.replace("_", " ") for name in ROUNDINGS}
_WHOLE = tuple(name for name, sharing in SHARING.items() if not sharing.rows)  # one descale for a whole sequence
_SCOPES = tuple(name for name in SHARING if name in get_args(Scope))
_ON = {False: "off", True: "on"}
_FP8: Json = {"operation": "forward", "dtype": "e4m3"}
_ROWS = {128: "of one size", (64, 32, 128): "of several"}
INPUT_KINDS = tuple(dict.fromkeys(d.kind for d in DISTRIBUTIONS.values()))
_TERMS = frozenset(KINDS)
_VALUES = tuple(dict.fromkeys(word for words in VALUES.values() for word in words))
# Axes along which a term has one value for all, by class; cases take those of a class in turn.
SHARED: Mapping[str, tuple[str, ...]] = {
    "none": ("",),
    "batch": ("b",),
    "heads": ("h",),
    "queries": ("q",),
    "keys": ("k",),
    "several": ("bh", "bq", "bhq", "hq", "bk", "hk", "bhk", "qk", "bqk", "hqk", "bhqk"),
}
_SHARED_BY_AXES = {of[0]: name for name, of in SHARED.items() if len(of) == 1}
DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("inputs", INPUT_KINDS, lambda case, config: DISTRIBUTIONS[case.recipe.distribution].kind),
    _counted("batch", "batch", {1: "1", 2: "2", 3: "3 or more"}),
    _counted("group", "group", {1: "1", 2: "2 to 4", 5: "5 or more"}),
    _counted("kv_heads", "nheads_kv", {1: "1", 2: "2 or 3", 4: "4 or more"}),
    Dimension("head_dim", (), lambda case, config: str(case.problem.head_dim)),
    Dimension(
        "value_dim",
        ("as keys", "other"),
        lambda case, config: "other" if "head_dim_v" in needed_features(case.problem) else "as keys",
    ),
    Dimension("queries", ("part of a tile", "one", "a tile", "several tiles"), _queries),
    Dimension(
        "keys",
        ("part of a tile", "none", "one", *TILES_OF_KEYS, "long"),
        _keys,
    ),
    Dimension("mask", ("none", "causal", "window both", "window left", "window right", "causal window left"), _mask),
    Dimension("softcap", ("off", "above 1", "at most 1"), _softcap),
    Dimension("scale", ("default", "tiny", "other", "above 1"), _scale),
    Dimension("layout", ("batched", "packed", "packed, some empty"), _layout),
    Dimension(
        "sinks",
        ("off", "on"),
        lambda case, config: _ON[case.problem.sinks],
        features=frozenset({"sinks"}),
    ),
    Dimension("term", ("none", *KINDS), lambda case, config: _of_term(case, "kind", "none"), features=_TERMS),
    Dimension("term_values", _VALUES, lambda case, config: _of_term(case, "values", "plain"), features=_TERMS),
    Dimension(
        "term_shared",
        tuple(SHARED),
        lambda case, config: _SHARED_BY_AXES.get(_of_term(case, "shared", ""), "several"),
        features=frozenset({*BROADCAST, "alibi"}),
    ),
    Dimension(
        "chunk",
        ("off", "on"),
        lambda case, config: _ON[case.problem.attention_chunk > 0],
        features=frozenset({"attention_chunk"}),
    ),
    Dimension("qv", ("off", "on"), lambda case, config: _ON[case.problem.qv], features=frozenset({"qv"})),
    Dimension(
        "cache",
        ("none", *dict.fromkeys(map(pages, (0, *_NAMED_PAGES, *PAGE_SIZES)))),
        _of_cache(lambda case, cache: pages(cache.page_size), "none"),
        features=CACHES,
    ),
    Dimension("behind", ("random", "nan"), _of_cache(lambda case, cache: cache.behind, "random"), features=CACHES),
    Dimension(
        "spare",
        ("some", "none"),
        _of_cache(lambda case, cache: "some" if cache.spare else "none", "some"),
        features=CACHES,
    ),
    Dimension(
        "appended", ("none", "one per query", MORE), _of_cache(_appended, "none"), features=frozenset({"append"})
    ),
    Dimension(
        "rotary",
        ("off", "part", "whole", "part, interleaved", "whole, interleaved"),
        _of_cache(_rotary, "off"),
        features=frozenset({"rotary"}),
    ),
    Dimension("leftpad", ("none", "up to 32", "over 32"), _of_cache(_leftpad, "none"), features=frozenset({"leftpad"})),
    Dimension(
        "indexed",
        ("off", "on"),
        _of_cache(lambda case, cache: _ON[cache.indexed], "off"),
        features=frozenset({"batch_idx"}),
    ),
    Dimension(
        "fp8",
        ("off", "tensor", "head", "row"),
        _of_cache(lambda case, cache: cache.fp8 or "off", "off"),
        features=frozenset({"fp8_cache", "fp8_rows"}),
    ),
    Dimension(
        "splits",
        ("one", "several"),
        lambda case, config: "one" if getattr(config, "num_splits", 1) == 1 else "several",
        operation="forward",
    ),
    Dimension("packing", ("off", "on"), _of_config("pack_gqa", False, _ON), operation="forward"),
    Dimension("output", ("bf16", "fp16"), _of_config("out_dtype", "bf16", {}), **_FP8),
    Dimension("promotion", ("every tile", "in parts", "chained"), _promotion, **_FP8),
    Dimension("descales", (*_WHOLE, "blocks", "other blocks"), _descales, **_FP8),
    Dimension(
        "rotation",
        ("off", "on"),
        lambda case, config: _ON[getattr(case.scheme, "hadamard_seed", None) is not None],
        **_FP8,
    ),
    Dimension("centring", ("off", "on"), _of_scheme("k_mean", False, _ON), **_FP8),
    Dimension("scaling", tuple(SCALINGS.values()), _of_scheme("rounding", "amax", SCALINGS), **_FP8),
    Dimension("scope", _SCOPES, _of_config("scope", "head", {}), operation="quantize"),
    Dimension("block_rows", ("of one size", "of several"), _of_config("block_rows", 128, _ROWS), operation="quantize"),
    Dimension("rounding", get_args(Scale), _of_config("scale", "amax", {}), operation="quantize"),
    Dimension("rotation", ("off", "on"), _of_config("rotate", False, _ON), operation="quantize"),
    Dimension("centring", ("off", "on"), _of_config("subtract_k_mean", False, _ON), operation="quantize"),
    Dimension("input", ("fp16", "bf16"), _of_config("input_dtype", "fp16", {}), operation="quantize"),
    Dimension("parts", tuple(map(str, PARTS)), _of_config("parts", 2, {}), operation="merge"),
    Dimension(
        "of_empty_parts",
        ("off", "on"),
        _of_config("unwritten", False, _ON),
        operation="merge",
        features=frozenset({UNWRITTEN}),
    ),
)
# What a call over a cache has, with the plainest class.
OF_CACHES = {d.name: d.classes[0] for d in DIMENSIONS if d.features & CACHES and d.name != "cache"}


def dimensions(kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return the dimensions that concern a kernel, each with all its classes, claimed or not, the plainest first."""
    own = {"head_dim": tuple(map(str, head_dims(kernel)))}
    return {d.name: own.get(d.name, d.classes) for d in DIMENSIONS if d.concerns(kernel)}


def point(kernel: Kernel, case: Case) -> dict[str, str]:
    """Return the class of a case in every dimension that concerns the kernel.

    Raises
    ------
    ValueError
        If the kernel has no configuration for the case.
    """
    config = kernel.config_for(case.problem, case.changes)
    return {d.name: d.of(case, config) for d in DIMENSIONS if d.concerns(kernel)}
