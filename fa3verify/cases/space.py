"""The space of cases: a case for any choice of classes, and which classes a kernel claims.

:func:`point` goes from a case to its classes, which are those of :mod:`fa3verify.cases.dimensions`, and :func:`case_of`
from classes to a case. :mod:`fa3verify.campaign.cover` chooses which classes meet, and
:mod:`fa3verify.cases.coverage` counts which were tried.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3_reference.scales import QuantScheme, can_rotate, rounding_fields
from fa3_reference.score_term import BROADCAST, KINDS, VALUES, Kind, ScoreTerm
from fa3verify.cases.case import Case
from fa3verify.cases.dimensions import (
    INPUT_KINDS,
    LONG,
    MORE,
    OF_CACHES,
    PAGE_SIZES,
    SCALINGS,
    SHARED,
    SIZES,
    TILE,
    TURNS,
    Point as Point,
    dimensions as dimensions,
    head_dims as head_dims,
    pages,
    point as point,
    rotated_channels,
)
from fa3verify.files import Json
from fa3verify.inputs.recipe import DISTRIBUTIONS, FAMILIES, UNCOMMON, Recipe
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.twins import Twin
from fa3verify.kernels.widths import BESIDE_V, is_absorbed
from fa3verify.operations.merge import PARTS
from fa3verify.operations.operation import needed_features


def case_of(kernel: Kernel, chosen: Point, seed: int = 0) -> Case:
    """Return a case that has the chosen classes, and the plainest class of every other dimension.

    Successive seeds take the families of a kind of inputs in turn, and the sizes of a class.

    Raises
    ------
    ValueError
        If there is no such case, or if by its declarations the kernel does not take it. The kernel is not called, and
        may still refuse the case.
    """
    families = [
        f for f in (*FAMILIES, *UNCOMMON) if DISTRIBUTIONS[f.distribution].kind == chosen.get("inputs", INPUT_KINDS[0])
    ]
    drawn = [family for family in families if not DISTRIBUTIONS[family.distribution].check]
    recipe = drawn[seed % len(drawn)].recipe(seed=seed)
    # Lengths depend on the tile, which the kernel chooses for a problem: a first case tells the tile.
    case = _made(kernel, chosen, recipe, TILE, TILE)
    try:
        config = kernel.config_for(case.problem, case.changes)
    except ValueError:
        return case  # without a configuration there is no tile; whoever runs the case meets the kernel's refusal
    if (tile := (getattr(config, "tile_m", TILE), getattr(config, "tile_n", TILE))) != (TILE, TILE):
        case = _made(kernel, chosen, recipe, *tile)
    own = point(kernel, case)
    if wrong := {name: c for name, c in chosen.items() if own.get(name, c) != c}:
        raise ValueError(f"{kernel.name} has no case of {wrong}")
    return case


def _made(kernel: Kernel, chosen: Point, recipe: Recipe, tile_m: int, tile_n: int) -> Case:
    """Return the case of the chosen classes for a tile of ``tile_m`` rows and ``tile_n`` keys.

    ValueError if by its declarations the kernel does not take it.
    """
    problem = _problem(kernel, chosen, tile_m, tile_n, recipe.seed)
    require(
        chosen.get("rotation") != "on" or can_rotate(problem.head_dim),
        f"a head_dim of {problem.head_dim} is not rotated",
    )
    changes = _changes(kernel, chosen, tile_n)
    scheme = _scheme(kernel, chosen, problem, tile_n)
    case = Case(kernel.name, problem, recipe, scheme, changes, kernel.operation)
    if lacking := (needed_features(problem) | case.needed_descales) - kernel.features:
        raise ValueError(f"{kernel.name} does not claim {', '.join(sorted(lacking))}")
    if words := kernel.misfit(problem):
        raise ValueError(words)
    return case


def _lengths(kernel: Kernel, chosen: Point, tile_m: int, tile_n: int) -> tuple[int, int]:
    """Return the number of queries and of keys of the first sequence, rounded up to lengths that the kernel takes."""
    n = {"one": 1, "a tile": tile_m, "several tiles": tile_m + 1}.get(chosen.get("queries", ""), 5)
    # More than a tile and one key, and a last tile of 128 that is half full.
    last_half = next(n for n in (192, 320, 448) if n % 128 == 64 and n > tile_n + 1)
    keys = {
        "none": 0,
        "one": 1,
        "a tile but one": tile_n - 1,
        "a tile": tile_n,
        "a tile and one": tile_n + 1,
        "half a tile last": last_half,
        "several tiles": 2 * tile_n + 5,
        "long": LONG + 6,
    }.get(chosen.get("keys", ""), 17 + (chosen.get("appended") == MORE) * n)
    return kernel.sizes.queries(n), kernel.sizes.keys(keys)


def _problem(kernel: Kernel, chosen: Point, tile_m: int, tile_n: int, turn: int) -> AttentionProblem:
    """Return the problem of the chosen classes; ``turn`` chooses among the sizes of a class."""
    # Packing a single head is a configuration of the twin, and no launch has it.
    plain_group = "2 to 4" if chosen.get("packing") == "on" and not isinstance(kernel.code, Twin) else "1"
    layout = chosen.get("layout", "batched")
    is_cached = any(chosen.get(name, plain_class) != plain_class for name, plain_class in OF_CACHES.items())
    stored = chosen.get("cache") or (place(kernel, turn) if is_cached else "none")
    is_ragged = "empty" in layout or (layout == "packed" and stored != "none")
    plain = {"batch": "2" if is_ragged else "1", "group": plain_group, "kv_heads": "1"}
    batch, group, nheads_kv = (
        (sizes := of[chosen.get(name, plain[name])])[turn % len(sizes)] for name, of in SIZES.items()
    )
    head_dim = int(chosen.get("head_dim") or next(iter(head_dims(kernel)), 0))
    n, m = _lengths(kernel, chosen, tile_m, tile_n)
    fields: Json = {
        "nheads": group * nheads_kv,
        "nheads_kv": nheads_kv,
        "head_dim": head_dim,
        "head_dim_v": 32 if head_dim != 32 else 64,
        "dtype": kernel.dtype,
        "softcap": {"above 1": 30.0, "at most 1": 0.1}.get(chosen.get("softcap", ""), 0.0),
        "softmax_scale": {"tiny": 1e-4, "other": 0.3, "above 1": 1.5}.get(chosen.get("scale", "")),
        "causal": "causal" in chosen.get("mask", ""),
    }
    if chosen.get("value_dim") != "other":
        del fields["head_dim_v"]
    if chosen.get("qv") == "on" or is_absorbed(kernel, head_dim):
        fields |= {"qv": True, "head_dim_v": head_dim - BESIDE_V}
    if chosen.get("sinks") == "on":
        fields["sinks"] = True
    if (term := _term(kernel, chosen, turn)) is not None:
        fields["term"] = term
    if chosen.get("chunk") == "on":
        fields["attention_chunk"] = max(1, m // 3)
    if "window" in (mask := chosen.get("mask", "")):
        fields["window"] = (-1 if "right" in mask else m // 3, -1 if "left" in mask else m // 5)
    if layout == "batched" and stored == "none":
        return kernel.fitted(AttentionProblem(batch=batch, seqlen_q=n, seqlen_k=m, **fields))
    # The lengths of the other sequences: queries and keys, in turn.
    others = [(2, 9), (3, 20)] if layout == "packed" else [(0, 9), (3, 0)]
    rest = [others[i % 2] for i in range(batch - 1)]
    lengths_q, lengths_k = zip((n, m), *((kernel.sizes.queries(a), kernel.sizes.keys(b)) for a, b in rest))
    if layout == "batched":
        lengths_q = (n,) * batch
    problem = AttentionProblem.varlen(lengths_q, lengths_k, **fields)
    if stored != "none":
        problem = replace(problem, cache=cache_of(kernel, problem, {**chosen, "cache": stored}, turn))
    return kernel.fitted(problem)


def _term(kernel: Kernel, chosen: Point, turn: int) -> ScoreTerm | None:
    """Return the term of the chosen classes; without a chosen kind the first that the kernel takes and that fits."""
    values = chosen.get("term_values", "plain")
    shared = chosen.get("term_shared", "none")
    is_plain = values == "plain" and shared == "none"
    fitting_kinds = [kind for kind in KINDS if kind in kernel.features and values in VALUES[kind]]
    kind = chosen.get("term") or ("none" if is_plain else next(iter(fitting_kinds), "none"))
    axes = SHARED[shared]
    return None if kind == "none" else ScoreTerm(kind=kind, shared=axes[turn % len(axes)], values=values)  # type: ignore[arg-type]


def terms(kernel: Kernel) -> list[ScoreTerm]:
    """Return terms of every kind that a kernel takes, the kinds in turn, each with all its shapes and values."""
    kinds: list[Kind] = [kind for kind in KINDS if kind in kernel.features]
    axes: dict[str, list[str]] = {kind: [""] for kind in kinds}
    axes |= {kind: [x for of in SHARED.values() for x in of] for kind in BROADCAST} | {"alibi": ["", "b"]}
    counts = {kind: max(len(axes[kind]), len(VALUES[kind]), 4) for kind in kinds}
    return [
        ScoreTerm(kind=kind, shared=axes[kind][i % len(axes[kind])], values=VALUES[kind][i % len(VALUES[kind])])
        for i in range(max(counts.values(), default=0))
        for kind in kinds
        if i < counts[kind]
    ]


def termed(kernel: Kernel, problem: AttentionProblem, turn: int) -> AttentionProblem:
    """Return a problem with one of the terms that a kernel takes, in turn; as it is where that does not fit it."""
    taken = terms(kernel)
    with contextlib.suppress(ValueError):
        return replace(problem, term=taken[turn % len(taken)]) if taken else problem
    return problem


def place(kernel: Kernel, turn: int) -> str:
    """Return the class of where keys lie in a call: by turns in pages, of each size, and in rows."""
    sizes = (kernel.page_sizes or PAGE_SIZES) if "paged" in kernel.features else ()
    has_rows = "seqused_k" in kernel.features or not sizes
    return "rows" if has_rows and (turn % 2 or not sizes) else pages(sizes[turn // 2 % len(sizes)])


def cache_of(kernel: Kernel, problem: AttentionProblem, chosen: Point, turn: int) -> Cache:
    """Return the cache of the chosen classes, of which "cache" is not "none", for the sequences of a packed problem.

    Raises
    ------
    ValueError
        If the kernel declares no such pages.
    """
    sizes = [n for n in (0, *(kernel.page_sizes or PAGE_SIZES)) if pages(n) == chosen["cache"]]
    if not sizes:
        raise ValueError(f"{kernel.name} takes no {chosen['cache']}")
    page_size = sizes[turn % len(sizes)]
    rotary = chosen.get("rotary", "off")
    whole = rotated_channels(problem)
    part = min((32, whole // 32 * 16)[turn % 2], max(0, whole - 16))
    appended = chosen.get("appended", "none" if rotary == "off" else "one per query")
    more = (page_size or 16) * (appended == MORE)  # which is across a page
    # In turn the pad brings positions beyond a rotary table of 2,048, which long rows would bring at a higher cost.
    pads = {"up to 32": (1, 7, 20), "over 32": ((2050, 33)[turn % 2], 50, 170)}
    first, step, most = pads.get(chosen.get("leftpad", ""), (0, 0, 1))
    fp8: Any = chosen.get("fp8", "off")
    return Cache(
        page_size,
        spare=int(chosen.get("spare") != "none"),
        new=tuple(min(s.seqlen_q + more, s.seqlen_k) for s in problem.sequences() if appended != "none"),
        rotary_dim=0 if rotary == "off" else whole if "whole" in rotary else part,
        interleaved="interleaved" in rotary,
        leftpad=tuple(first + step * (i + turn) % most for i in range(problem.batch) if first),
        indexed=chosen.get("indexed") == "on",
        behind="nan" if chosen.get("behind") == "nan" else "random",
        seed=turn,
        fp8="" if fp8 == "off" else fp8,
    )


def _changes(kernel: Kernel, chosen: Point, tile_n: int) -> tuple[tuple[str, Any], ...]:
    """Return the fields of the configuration that give the chosen classes, sorted by name.

    For a forward fields without a chosen class keep the kernel's default; a quantiser gets all of its fields.
    """
    changes: Json = {}
    if kernel.operation == "forward":
        wanted = {
            "num_splits": {"one": 1, "several": 3}.get(chosen.get("splits", "")),
            "pack_gqa": {"off": False, "on": True}.get(chosen.get("packing", "")),
            "out_dtype": chosen.get("output"),
            "promotion_interval": {"every tile": tile_n, "in parts": tile_n // 2, "chained": 0}.get(
                chosen.get("promotion", "")
            ),
        }
        changes = {name: x for name, x in wanted.items() if x is not None and name in kernel.changeable}
    elif kernel.operation == "quantize":
        changes = {
            "scope": chosen.get("scope", "head"),
            "scale": chosen.get("rounding", "amax"),
            "block_rows": (64, 32, 128) if chosen.get("block_rows") == "of several" else 128,
            "rotate": chosen.get("rotation") == "on",
            "subtract_k_mean": chosen.get("centring") == "on",
            "input_dtype": chosen.get("input", "fp16"),
            "seed": 1,
        }
    elif kernel.operation == "merge":
        changes = {"parts": int(chosen.get("parts", PARTS[0])), "unwritten": chosen.get("of_empty_parts") == "on"}
    return tuple(sorted(changes.items()))


def _scheme(kernel: Kernel, chosen: Point, problem: AttentionProblem, tile_n: int) -> QuantScheme | None:
    """Return how the operands of an e4m3 forward are quantised; None for other kernels."""
    if kernel.operation != "forward" or kernel.dtype != "e4m3":
        return None
    require(chosen.get("centring") != "on" or not problem.softcap, "K is not centred under a softcap")
    descales = chosen.get("descales", "head")
    is_other = descales == "other blocks"
    return QuantScheme(
        "block" if "blocks" in descales else descales,  # type: ignore[arg-type]
        block_rows_q=32 if is_other else tile_n,
        block_rows_k=2 * tile_n if is_other else tile_n,
        block_rows_v=tile_n,
        hadamard_seed=0 if chosen.get("rotation") == "on" else None,
        k_mean=chosen.get("centring") == "on",
        **rounding_fields(next(name for name, word in SCALINGS.items() if word == chosen.get("scaling", "exact"))),
    )


def claimed(kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return the classes of each dimension that a kernel claims by the features and sizes it declares.

    Dimensions of which it claims no class are left out. The kernel is not called, and may refuse more.
    """
    possible = {
        name: tuple(c for c in classes if _is_claimed(kernel, {name: c}))
        for name, classes in dimensions(kernel).items()
    }
    return {name: classes for name, classes in possible.items() if classes}


def _is_claimed(kernel: Kernel, chosen: Point) -> bool:
    for turn in range(TURNS):  # a kernel may take something of a cache in pages or in rows alone
        with contextlib.suppress(ValueError):
            case_of(kernel, chosen, turn)
            return True
    return False
