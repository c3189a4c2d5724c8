"""Calling conventions that many kernels imitate: a function that is called as a public one is a kernel as it stands.

``@fa3verify.kernel(like="sdpa")`` declares a function with the arguments of torch's ``scaled_dot_product_attention``.
:func:`facts_of` says what a convention declares, and :func:`adapted` calls the function by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Signature
from typing import Any, Literal, get_args

from fa3_reference.score_term import ScoreTerm
from fa3verify.files import Json
from fa3verify.kernels.loading import bare, parameters, required
from fa3verify.kernels.policy import Policy

Convention = Literal["sdpa", "flash_attn", "flash_attn_varlen", "flash_attn_kvcache", "flex"]
_GQA = "enable_gqa"  # torch's switch; a function without it takes as many heads in k as in q
_TORCH: Json = {"library": "torch", "features": ("causal", "gqa")}
_FLASH: Json = {"library": "torch", "layout": "bshd", "features": ("causal", "gqa", "window", "softcap")}
_FACTS: Mapping[str, Json] = {
    "sdpa": _TORCH | {"features": (*_TORCH["features"], "bias", "attn_mask"), "policy": Policy(causal="top_left")},
    "flash_attn": _FLASH | {"features": (*_FLASH["features"], "alibi")},
    "flash_attn_varlen": _FLASH | {"always": ("varlen",)},
    "flash_attn_kvcache": _FLASH | {"features": (*_FLASH["features"], "paged", "seqused_k")},
    "flex": _TORCH | {"features": ("gqa",)},
}
# The names that public functions have for an argument of ours; the first that a function has is taken.
_TORCHS = {
    "softmax_scale": ("scale", "sm_scale", "softmax_scale", "scaling"),
    "causal": ("is_causal", "causal"),
    "window": ("window_size", "window"),
    "bias": ("attn_mask", "attn_bias", "bias", "mask"),
    "attn_mask": ("attn_mask", "mask"),
}
_FLASHS = {
    "softmax_scale": ("softmax_scale", "sm_scale", "scale", "scaling"),
    "causal": ("causal", "is_causal"),
    "window": ("window_size", "window"),
    "bias": ("bias", "attn_bias"),
    "page_table": ("page_table", "block_table"),
    "k_new": ("k",),
    "v_new": ("v",),
}
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = dict.fromkeys(_FACTS, _FLASHS) | dict.fromkeys(
    ("sdpa", "flex"), _TORCHS
)
_ARGUMENTS = {  # of features that a function has if it has an argument for them, ours
    "causal": "causal",
    "window": "window",
    "softcap": "softcap",
    "bias": "bias",
    "bias_fp32": "bias",
    "attn_mask": "attn_mask",
    "key_padding": "key_padding_mask",
    "alibi": "alibi_slopes",
    "sinks": "sinks",
    "paged": "page_table",
}
_ASKS_FOR_LSE = ("return_lse", "return_softmax_lse", "return_attn_probs")
_SILENT: Json = {"window": (-1, -1), "softcap": 0.0}  # left out where a function has no such argument
# What a function is given for an argument that it requires, in a call that has nothing of the kind.
_UNSAID: Json = {
    **dict.fromkeys(("causal", "is_causal"), False),
    **dict.fromkeys(("mask", "attn_mask", "attn_bias", "bias", "alibi_slopes", "sinks")),
    **dict.fromkeys(("dropout", "dropout_p"), 0.0),
    **_SILENT,
    "window_size": (-1, -1),
}
_SAID = ("causal", "softmax_scale")  # left out there as well: its declared sizes say that calls have one value


def facts_of(convention: str, function: Callable[..., Any]) -> Json:
    """Return what a function declares by its convention: features whose arguments it lacks are left out.

    Raises
    ------
    ValueError
        For an unknown convention, with those that exist.
    """
    if convention not in get_args(Convention):
        raise ValueError(f"like must be among {', '.join(get_args(Convention))}, got {convention!r}")
    facts = dict(_FACTS[convention])
    if (known := _arguments(function)) is not None:
        lacking = {name for name, ours in _ARGUMENTS.items() if not known.intersection(_names(convention, ours))}
        if _NAMES[convention] is _TORCHS and _GQA not in known:
            lacking |= {"gqa"}
        facts["features"] = tuple(name for name in facts["features"] if name not in lacking)
        if not known.intersection(_names(convention, "softmax_scale")):
            facts["softmax_scale"] = "default"
    return facts


def features_of(convention: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the features for which a function has an argument, those of caches left out."""
    known = _arguments(function) or frozenset()
    named = {name for name, ours in _ARGUMENTS.items() if known.intersection(_names(convention, ours))}
    return tuple(name for name in _ARGUMENTS if name in named - {"paged"})


def adapted(convention: str, function: Callable[..., Any], mods: ScoreTerm | None = None) -> Callable[..., Any]:
    """Return a function that is called as kernels are, and calls another by a convention.

    Parameters
    ----------
    convention : {"sdpa", "flash_attn", "flash_attn_varlen", "flash_attn_kvcache", "flex"}
        Whose arguments the function has; those that say nothing in a call may be missing.
    function : callable
        It returns out, or a tuple that begins with out and lse. What has not the two or three dimensions of lse is
        none, such as the weights that some functions return.
    mods : ScoreTerm, optional
        Its ``score_mod`` and ``mask_mod``, which it is given as far as it has arguments for them, a ``block_mask`` too.

    Returns
    -------
    callable
        As :class:`fa3verify.kernels.arrays.ArrayFunction` calls it. It can travel to other processes.
    """
    return partial(_call, convention, function, mods)


def _call(convention: str, function: Callable[..., Any], mods: ScoreTerm | None, *arrays: Any, **options: Any) -> Any:
    known = _arguments(function)
    given: Json = dict.fromkeys(set(_ASKS_FOR_LSE).intersection(known or ()), True)
    if known and _GQA in known:
        given[_GQA] = arrays[0].shape[1] != arrays[1].shape[1]
    if mods is not None:
        from fa3verify.tensors.mods import arguments_of

        functions = {name: bare(x) for name in ("score_mod", "mask_mod") if (x := getattr(mods, name))}
        given |= arguments_of(functions, known or frozenset(), *arrays[:2])
    for name, value in _masked(convention, options, arrays).items():
        theirs = _names(convention, name)
        taken = next((each for each in theirs if known is None or each in known), None)
        is_left_out = (known is not None and name in _SAID) or (name in _SILENT and value == _SILENT[name])
        if value is not None and (taken or not is_left_out):
            given[taken or theirs[0]] = value
    returned = _by_position(function, arrays, given)
    if not isinstance(returned, tuple | list):
        return returned
    has_lse = getattr(returned[1], "ndim", 0) in (2, 3)  # others return their weights, or None
    return tuple(returned[:2]) if has_lse else returned[0]


def _by_position(function: Callable[..., Any], arrays: tuple[Any, ...], given: Json) -> Any:
    """Call a function by position as far as it can be: the ``apply`` of torch's autograd functions takes no keyword."""
    if not (known := parameters(function)):
        return function(*arrays, **given)
    lacking = set(required(function)[len(arrays) :]) - given.keys()
    given |= {name: value for name, value in _UNSAID.items() if name in lacking}
    bound = Signature(list(known.values())).bind(*arrays, **given)
    bound.apply_defaults()
    return function(*bound.args, **bound.kwargs)


def _masked(convention: str, options: Json, arrays: tuple[Any, ...]) -> Json:
    """Return the options with a causal mask in the one that is given: torch takes no two masks of a call."""
    name = next((name for name in ("attn_mask", "bias") if options.get(name) is not None), None)
    if convention != "sdpa" or name is None or not options.get("causal"):
        return options
    from fa3verify.tensors.convert import with_causal

    return options | {name: with_causal(options[name], arrays[0].shape[-2], arrays[1].shape[-2]), "causal": False}


def _names(convention: str, ours: str) -> tuple[str, ...]:
    return _NAMES[convention].get(ours, (ours,))


def _arguments(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of a function's arguments; None where it takes any, or where Python knows none."""
    known = parameters(function)
    return None if any(x.kind is x.VAR_KEYWORD for x in known.values()) else frozenset(known) or None
