"""Calling conventions that many kernels imitate: a function that is called as a public one is a kernel as it stands.

``@fa3verify.kernel(like="sdpa")`` declares a function with the arguments of torch's ``scaled_dot_product_attention``.
:func:`facts_of` says what a convention declares, and :func:`adapted` calls the function by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

from fa3verify.files import Json
from fa3verify.kernels.loading import parameters
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
_TORCHS = {"softmax_scale": ("scale",), "causal": ("is_causal",), "bias": ("attn_mask",)}
_FLASHS = {"window": ("window_size",), "page_table": ("page_table", "block_table"), "k_new": ("k",), "v_new": ("v",)}
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = dict.fromkeys(_FACTS, _FLASHS) | dict.fromkeys(
    ("sdpa", "flex"), _TORCHS
)
_ASKS_FOR_LSE = ("return_lse", "return_softmax_lse", "return_attn_probs")
_SILENT: Json = {"causal": False, "window": (-1, -1), "softcap": 0.0}  # left out where a function has no such argument


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
    known = _arguments(function)
    if known is not None:
        needed = {name: name for name in ("causal", "window", "softcap", "bias", "attn_mask")} | {
            "paged": "page_table",
            "alibi": "alibi_slopes",
        }
        if _NAMES[convention] is _TORCHS:
            needed["gqa"] = _GQA
        lacking = {name for name, ours in needed.items() if not known.intersection(_names(convention, ours))}
        facts["features"] = tuple(name for name in facts["features"] if name not in lacking)
    return facts


def adapted(convention: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called as kernels are, and calls another by a convention.

    Parameters
    ----------
    convention : {"sdpa", "flash_attn", "flash_attn_varlen", "flash_attn_kvcache", "flex"}
        Whose arguments the function has; those that say nothing in a call may be missing.
    function : callable
        It returns out, or a tuple that begins with out and lse.

    Returns
    -------
    callable
        As :class:`fa3verify.kernels.arrays.ArrayFunction` calls it. It can travel to other processes.
    """
    return partial(_call, convention, function)


def _call(convention: str, function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    known = _arguments(function)
    given: Json = dict.fromkeys(set(_ASKS_FOR_LSE).intersection(known or ()), True)
    if known and _GQA in known:
        given[_GQA] = arrays[0].shape[1] != arrays[1].shape[1]
    for name, value in _masked(convention, options, arrays).items():
        theirs = _names(convention, name)
        taken = next((each for each in theirs if known is None or each in known), None)
        if value is not None and (taken or name not in _SILENT or value != _SILENT[name]):
            given[taken or theirs[0]] = value
    returned = function(*arrays, **given)
    return tuple(returned[:2]) if isinstance(returned, tuple | list) else returned


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
