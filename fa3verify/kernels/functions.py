"""A user's function of arrays as a kernel: torch tensors or numpy arrays in and out, a few facts declared.

    from fa3verify.kernels.functions import torch_kernel

    def mine():
        return torch_kernel(my_attention, dtypes=("bf16",), layout="bhsd", features=("causal", "gqa"))

``fa3verify verify mymodule:mine`` then judges it; with ``gradients="autograd"`` it judges its dQ, dK and dV. How the
function is called stands in :mod:`fa3verify.kernels.arrays`; the decorator :func:`fa3verify.kernel` is a third way in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, get_args

from fa3_kernels.plan.config import OutDtype
from fa3_reference.bounds import BackwardModel, KernelModel, Quantises
from fa3_reference.problem import Dtype
from fa3_reference.rules import require
from fa3_reference.score_term import KINDS
from fa3verify import operations
from fa3verify.files import Json
from fa3verify.kernels.arrays import (
    ARRAY_FEATURES,
    ArrayFunction,
    GradientsOf,
    Layout,
    Library,
    LseBase,
    LseLayout,
    Merges,
)
from fa3verify.kernels.conventions import Convention, adapted, facts_of
from fa3verify.kernels.layouts import CacheLayout, Groups, Packed
from fa3verify.kernels.loading import MODS, declared_mods
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.sizes import gathered
from fa3verify.operations.merge import UNWRITTEN
from fa3verify.operations.operation import Accumulator

__all__ = ["ArrayFunction", "Facts", "FunctionFacts", "KernelFacts", "array_kernel", "torch_kernel"]


class Facts(TypedDict, total=False):
    """Fields of :class:`~fa3verify.kernels.record.Kernel`, :class:`~fa3verify.kernels.record.Code`,
    :class:`~fa3verify.kernels.sizes.Sizes` and :class:`ArrayFunction` that a user may set; each means what it means
    there. A pair among ``head_dims`` is one of Q and K, and the one of V.
    """

    features: Iterable[str]
    bitwise: Iterable[str]
    description: str
    order: Callable[[Any], KernelModel | BackwardModel]
    accumulator: Accumulator | None
    quantises: Quantises
    policy: Policy
    head_dims: tuple[int | tuple[int, int], ...] | None
    page_sizes: tuple[int, ...] | None
    always: tuple[str, ...]
    combinations: tuple[str, ...]
    slopes_by_head: bool
    finite_biases: bool
    equal_lengths: bool
    queries_within_keys: bool
    seqlen_multiple: int
    seqlen_q_multiple: int
    seqlen_k_multiple: int
    min_seqlen: int
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    max_batch: int | None
    max_nheads: int | None
    max_group: int | None
    score_mod: Callable[..., object] | str | None
    mask_mod: Callable[..., object] | str | None
    score_mod_ulp: float
    softmax_scale: float | tuple[float, float] | Literal["default"] | None
    changeable: frozenset[str]
    merge: Merges
    lse_base: LseBase
    lse_layout: LseLayout
    cache_layout: CacheLayout
    packed: Packed
    groups: Groups
    launchable: Callable[..., object]
    identity: Callable[[], Mapping[str, str | None]]
    twin: Kernel | None
    unavailable: str | None


class FunctionFacts(Facts, total=False):
    """Keywords of :func:`torch_kernel` beside ``device``; :func:`array_kernel` describes them."""

    dtypes: Iterable[Dtype]
    name: str
    layout: Layout
    out_dtype: OutDtype | Literal["", "fp32"]
    gradients: GradientsOf


class KernelFacts(FunctionFacts, total=False):
    """Keywords of the decorator :func:`fa3verify.kernel`; :func:`array_kernel` describes them."""

    library: Library
    device: str
    like: Convention


_LAYOUTS = {
    "lse_base": LseBase,
    "lse_layout": LseLayout,
    "cache_layout": CacheLayout,
    "packed": Packed,
    "groups": Groups,
}
_OF_CODE = ("merge", *_LAYOUTS, "launchable", "identity")  # facts that are fields of ArrayFunction
_BY_HEAD = frozenset({"bias", "bias_fp32", "attn_mask", "alibi", "query_head_descale", "mods"})  # of query heads
_NOT_OF_MODS = frozenset({*KINDS, "varlen", "paged", "seqused_k"})


def array_kernel(
    function: Callable[..., object],
    *,
    dtypes: Iterable[Dtype] = ("fp16",),
    name: str = "",
    layout: Layout = "bhsd",
    out_dtype: OutDtype | Literal["", "fp32"] = "",
    library: Library = "numpy",
    device: str = "cpu",
    gradients: GradientsOf = "",
    **facts: Unpack[Facts],
) -> tuple[Kernel, ...]:
    """Make kernels of a function, one per dtype, named ``NAME.DTYPE``, ``NAME.backward.DTYPE`` or ``NAME.merge.DTYPE``.

    Parameters
    ----------
    function : callable
        As :class:`ArrayFunction` calls it, for an output, for gradients, or with ``merge`` for parts of an output.
    dtypes : iterable of {"fp16", "bf16", "e4m3", "fp32"}
        Formats of the operands that it takes; there is one kernel for each.
    name : str
        What the kernels are called in front of their format, by default the function's own name.
    layout : {"bhsd", "bshd"}
        Of batched arrays, as :class:`ArrayFunction` says.
    out_dtype : {"", "fp16", "bf16", "fp32"}
        Of an e4m3 function's output, bf16 by default, and of what a merge returns; others return their own format.
    library : {"torch", "numpy"}
        Whose arrays it takes and returns. Numpy ones of bf16 and e4m3 have the dtypes of ml_dtypes.
    device : str
        Where torch tensors are made, such as "cpu" or "cuda".
    gradients : {"", "autograd", "given", "own"}
        Empty to judge the output. Otherwise gradients are judged: "autograd" has torch differentiate the function;
        with "given" the function computes them from the out and lse that it gets, with "own" from a forward of its own.
    **facts : Facts
        The rest. By default ``features`` are causal and gqa, and ``bitwise`` is empty: no property is claimed.

    Returns
    -------
    tuple of Kernel
        One for each dtype.

    Raises
    ------
    ValueError
        For a misspelt fact, dtype, layout, output format, feature, property, accumulator or kind of gradients, with
        those that exist; for "autograd" of what takes no torch tensors, and for an accumulator beside an order.

    Examples
    --------
    >>> def mine(q, k, v, *, softmax_scale, causal): ...
    >>> [kernel.name for kernel in array_kernel(mine, dtypes=("fp16", "bf16"), features=("causal",))]
    ['mine.fp16', 'mine.bf16']
    """
    sizes = _sizes(facts, gradients)
    dtypes = tuple(dtypes)
    own: Json = {name: facts.pop(name) for name in _OF_CODE if name in facts}
    code = ArrayFunction(
        function,
        layout,
        library,
        device,
        sizes["features"],
        out_dtype,
        gradients,
        (facts.get("page_sizes") or (16,))[0],  # any size of a page would do where none is declared
        **own,
    )
    _check_facts(facts, dtypes, code)
    return _declared(code, name or getattr(function, "__name__", "function"), dtypes, gathered({**facts, **sizes}))


def declared_kernels(function: Callable[..., Any], facts: Json) -> tuple[Kernel, ...]:
    """Return the kernels that the decorator :func:`fa3verify.kernel` makes of a function with its keywords."""
    declared: Json = {"name": getattr(function, "__name__", ""), **facts}
    called = function
    if like := declared.pop("like", ""):
        declared = facts_of(like, function) | declared
        mods = declared_mods(dict(declared), function)
        called = adapted(like, function, mods) if mods else adapted(like, function)
        declared |= {name: getattr(mods, name, None) or None for name in MODS}
    return array_kernel(called, **declared)


def _sizes(facts: Facts, gradients: str) -> Json:
    """Return the features, with those that sizes need, the fewest keys of a sequence, and pairs of head dims."""
    is_packed = facts.get("packed") == "qkv"
    usual = ("causal",) if facts.get("merge") or is_packed else ("causal", "gqa")
    features = frozenset(facts.get("features", usual)) | set(facts.get("always", ()))
    features |= {"sinks"} if "narrow_sinks" in features else set()
    features |= {"causal"} if UNWRITTEN in features else set()  # which leaves parts without keys
    features |= {"mods"} if any(facts.get(name) for name in MODS) else set()
    # Unless a user declares it, gradients of sequences without keys are not asked for.
    sizes: Json = {"features": features, "min_seqlen": facts.get("min_seqlen", 1 if gradients else 0)}
    sizes |= {"equal_lengths": True} if is_packed else {}
    pairs = tuple(d if isinstance(d, tuple) else (d, d) for d in facts.get("head_dims") or ())
    if any(d != v for d, v in pairs):
        sizes |= {"features": features | {"head_dim_v"}, "head_dims": tuple(dict(pairs)), "head_dims_v": pairs}
    return sizes


def _declared(code: ArrayFunction, name: str, dtypes: Iterable[Dtype], facts: Json) -> tuple[Kernel, ...]:
    """Return kernels of a function with the facts that were declared, one for each dtype."""
    mods = declared_mods(facts, code.function)
    declared = {**facts, "mods": mods, "features": code.features, "bitwise": frozenset(facts.get("bitwise", ()))}
    kernels = (
        Kernel(
            f"{name}.{dtype}" if code.operation == operations.FORWARD else f"{name}.{code.operation}.{dtype}",
            dtype,
            code,
            code.features,
            operation=code.operation,
            device=code.device,
            forward="own" if code.gradients in ("autograd", "own") else "given",
        )
        for dtype in dtypes
    )
    return tuple(replace(kernel, **declared) for kernel in kernels)


def _rules(code: ArrayFunction, dtypes: tuple[str, ...], quantises: Quantises | None) -> tuple[tuple[object, str], ...]:
    """Return rules of which facts go together, each with whether it is broken."""
    features = code.features
    of_caches = bool(features & {"paged", "seqused_k"})
    terms = sorted(features & set(KINDS))
    wide = sorted(set(dtypes) - {"fp16", "bf16"})
    by = quantises or Quantises()
    return (
        (
            code.gradients == "autograd" and code.library != "torch",
            f"autograd is torch's: the library must be torch, got {code.library}",
        ),
        (
            code.gradients and (code.merge or code.lse_base != "e"),
            "a function of gradients merges no parts, and its lse is a natural logarithm",
        ),
        (code.merge and "e4m3" in dtypes, "parts that are merged are of fp16, bf16 or fp32, got dtypes e4m3"),
        (
            code.packed and (code.gradients or of_caches or code.layout != "bshd"),
            'packed operands are those of a forward without a cache, in layout "bshd"',
        ),
        (code.packed == "qkv" and features & {"gqa", "head_dim_v"}, "q, k and v in one array have one shape"),
        (
            code.cache_layout != "nhd" and (not of_caches or "fp8_rows" in features),
            "cache_layout is that of a cache whose keys have no descales of their own",
        ),
        (
            code.groups == "interleaved" and (features & _BY_HEAD or code.gradients),
            f"interleaved groups are those of a forward with none of {', '.join(sorted(_BY_HEAD))}",
        ),
        (
            "mods" in features
            and (features & _NOT_OF_MODS or {code.operation, *dtypes} & {"backward", "merge", "e4m3"}),
            f"a score_mod or mask_mod is that of a forward with none of e4m3, {', '.join(sorted(_NOT_OF_MODS))}",
        ),
        (
            by.said and (code.gradients or code.merge or "e4m3" in dtypes or "qv" in features),
            "quantises is of a forward of fp16, bf16 or fp32 operands, and not of one that takes qv",
        ),
        (
            by.smooth_k and features & {"softcap", "sinks"},
            "smooth_k moves all scores of a row, which a softcap or a sink beside them does not allow",
        ),
        (
            "narrow_sinks" in features and wide,
            f"narrow_sinks are of fp16 or bf16, got dtypes {', '.join(wide)}",
        ),
        (terms and of_caches, f"a kernel of caches takes no term of scores, got {', '.join(terms)}"),
    )


def _check_facts(facts: Facts, dtypes: tuple[str, ...], code: ArrayFunction) -> None:
    """Raise ValueError for a misspelt word; the message lists the words that are known."""
    features = code.features
    for is_broken, rule in _rules(code, dtypes, facts.get("quantises")):
        require(not is_broken, rule)
    if unknown := sorted(facts.keys() - Facts.__annotations__.keys()):
        known = ", ".join(sorted(KernelFacts.__annotations__))
        raise ValueError(f"{unknown[0]} is no fact of a kernel; known are {known}")
    operation = operations.find(code.operation)
    taken = sorted(ARRAY_FEATURES & operation.features | operation.serving - {"mods"})
    words = (
        *((dtype, get_args(Dtype), "dtype") for dtype in dtypes),
        *((feature, taken, "feature") for feature in sorted(features - {"mods"} | set(facts.get("features", ())))),
        (code.layout, get_args(Layout), "layout"),
        (code.gradients, get_args(GradientsOf), "gradients"),
        (code.out_dtype, ("", *get_args(OutDtype), *["fp32"] * bool(code.merge)), "out_dtype"),
        (code.merge, get_args(Merges), "merge"),
        *((getattr(code, name), get_args(kind), name) for name, kind in _LAYOUTS.items()),
    )
    for value, known, what in words:
        require(value in known, f"{what} must be among {', '.join(map(str, known))}, got {value!r}")


def torch_kernel(
    function: Callable[..., object], *, device: str = "cpu", **facts: Unpack[FunctionFacts]
) -> tuple[Kernel, ...]:
    """Make kernels of a function of torch tensors on a device; the rest is as in :func:`array_kernel`.

    Parameters
    ----------
    function : callable
        As in :func:`array_kernel`, of torch tensors.
    device : str
        Where its tensors are made, such as "cpu" or "cuda".
    **facts : FunctionFacts
        The rest, as in :func:`array_kernel`.

    Returns
    -------
    tuple of Kernel
        One for each dtype, in their order.

    Raises
    ------
    ValueError
        As :func:`array_kernel` does.

    Examples
    --------
    >>> def mine(q, k, v, *, softmax_scale): ...
    >>> [kernel.device for kernel in torch_kernel(mine, device="cuda", features=())]
    ['cuda']
    """
    return array_kernel(function, library="torch", device=device, **facts)
