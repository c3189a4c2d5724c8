"""What is watched: functions of attention by module and name, how their arguments are read, and their replacement.

A function is replaced in every dictionary that holds it: names of modules that imported it, attributes of objects,
registries. What holds it otherwise, such as a closure or a partial function, calls the original unseen.

In compiled code an operator stays in the graph and looks at a call whenever the graph runs. Only torch's own function
has it, and no gradients; of other call sites it is counted that their calls are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fa3verify.models.calls import Facts, read, read_transformers

Function = Callable[..., Any]
SDPA = "scaled_dot_product_attention"
_INTERFACE = "AttentionInterface"
_FLASH = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
_WATCHED = {  # names by module; a module is looked at once it is imported
    "torch.nn.functional": (SDPA,),
    "torch.nn.attention.varlen": ("varlen_attn",),
    "flash_attn": _FLASH,
    "flash_attn.cute": _FLASH,
    "flash_attn_interface": _FLASH,
    "fa3_kernels.api": _FLASH,
    "transformers.modeling_utils": (_INTERFACE,),
}
_SEEN_INSIDE = ("sdpa_", "flex_", "eager_", "flash_paged", "paged_")  # functions of Transformers that call others


class Target(NamedTuple):
    """A function that is watched: its name in the page, and how its arguments are bound and read, q, k and v first.

    One that ``swaps`` takes a module before q, and heads in front of queries, which it returns behind.
    """

    name: str
    original: Function
    signature: inspect.Signature
    read: Callable[[Facts], Facts]
    swaps: bool = False


def _of_torch(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Have the signature of torch's builtin function."""


def _of_transformers(  # noqa: PLR0913 (Transformers')
    module,
    query,
    key,
    value,
    attention_mask=None,
    *,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    s_aux=None,
    **others,
):
    """Have the signature of a function of Transformers' AttentionInterface."""


def target_of(module: str, name: str, original: Function) -> Target:
    """Return how a function is watched: torch's, one of FlashAttention's kind, or one of Transformers' interface."""
    if module == "transformers":
        return Target(f"transformers {name}", original, inspect.signature(_of_transformers), read_transformers, True)
    is_torch = name == SDPA
    signature = inspect.signature(_of_torch if is_torch else original)
    reader = partial(
        read,
        defaults={each.name: each.default for each in signature.parameters.values()},
        layout="bhsd" if is_torch else "bshd",
    )
    return Target(name if is_torch else f"{module}.{name}", original, signature, reader)


class Replacements(contextlib.ExitStack):
    """The functions that are replaced until it is closed; ``wrapped`` makes the replacement of a target."""

    def __init__(self, wrapped: Callable[[Target], Function]) -> None:
        super().__init__()
        self._wrapped = wrapped
        self._waiting = set(_WATCHED)

    def start(self) -> None:
        """Replace what is imported already, and have the rest replaced when it is imported."""
        self._replace(*(sys.modules[name] for name in _WATCHED if name in sys.modules))
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        self.callback(sys.meta_path.remove, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Let others find a module, and replace its functions once it has run; the import system calls this."""
        if name not in self._waiting:
            return None
        self._waiting.remove(name)
        spec = find_spec(name)
        if spec and spec.loader:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), self._replace(module))[0]  # type: ignore[method-assign]
        return spec

    def _replace(self, *modules: ModuleType) -> None:
        made: dict[Function, Function] = {}
        for module, name in ((x, name) for x in modules for name in _WATCHED[x.__name__]):
            original: Any = getattr(module, name, None)
            if name == _INTERFACE:
                self.callback(setattr, original, "__getitem__", original.__getitem__)
                original.__getitem__ = self._getter(original.__getitem__)
            elif original is not None and not hasattr(original, "__signature__"):  # one of ours, by another module
                made[original] = self._wrapped(target_of(module.__name__, name, original))
                if name == SDPA:  # torch.jit.script knows builtin functions by their identity
                    torch.jit._builtins._register_builtin(made[original], f"aten::{SDPA}")  # type: ignore[attr-defined]
                    self.callback(torch.jit._builtins._get_builtin_table().pop, id(made[original]))  # type: ignore[attr-defined]
        _exchange(made)
        self.callback(_exchange, {new: old for old, new in made.items()})  # behind it, as it has them as values

    def _getter(self, get: Function) -> Function:
        """Return how Transformers looks functions up that are watched, one for each, so that compiled code stays."""
        watched: dict[Function, Function] = {}

        def __getitem__(mapping: Any, name: str) -> Function:
            original: Function = get(mapping, name)
            if original not in watched and not original.__name__.startswith(_SEEN_INSIDE):
                watched[original] = self._wrapped(target_of("transformers", name, original))
            return watched.get(original) or original

        return __getitem__


def _exchange(made: Mapping[Function, Function]) -> None:
    """Put functions in the place of others in every dictionary that has these as values, but for torch's C modules.

    All at once, as looking through everything takes long where a model is loaded.
    """
    new = {id(old): function for old, function in made.items()}
    for holder in gc.get_referrers(*made):
        if type(holder) is dict and not str(holder.get("__name__")).startswith("torch._C"):
            holder.update({name: new[id(value)] for name, value in list(holder.items()) if id(value) in new})


lookers: list[Callable[..., None]] = []  # of what watches, or empty
_calls = torch.zeros((), dtype=torch.int64, device="cpu")  # the operator changes it, and so is not dropped as useless
_sites: list[str] = []  # layers by the numbers of their call sites


def called(target: Target, args: tuple[Any, ...], kwargs: Facts) -> Any:
    """Make a user's call; modes and subclasses of torch compare the function that they get with what its name holds."""
    if target.name != SDPA or not torch.overrides.has_torch_function((*args, *kwargs.values())):
        return target.original(*args, **kwargs)
    replacement = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = target.original
    try:
        return target.original(*args, **kwargs)
    finally:
        torch.nn.functional.scaled_dot_product_attention = replacement


def traced(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call that is being compiled, and have it looked at when the code runs."""
    out = target.original(*args, **kwargs)
    site = _site(target.name)
    if site >= 0:
        _look_at(site, out, *args, **kwargs)
    return out


def _look_at(site, out, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
    q, k, v, seen = (x.detach() for x in (query, key, value, out))
    mask = attn_mask if attn_mask is None else attn_mask.detach()
    _look(_calls, site, [seen, q, k, v], mask, dropout_p, is_causal, others.get("scale"))


@torch.compiler.assume_constant_result
def _site(name: str) -> int:
    """Return the number of a call site when it is compiled, -1 if its calls are not seen."""
    if name != SDPA or torch.compiler.is_exporting():  # here, as dynamos before 2.12 would take it for true
        for looker in lookers:
            looker(f"call sites of {name} in compiled or exported code, whose calls are not seen")
        return -1
    tracers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
    stacks = (getattr(x, "nn_module_stack", None) for x in tracers)  # of dynamo's, from the innermost frame on
    paths = (list(stack.values())[-1][0] for stack in stacks if stack)
    _sites.append(f"compiled {next(paths, len(_sites))}")
    return len(_sites) - 1


@torch.library.custom_op("fa3verify_watch::look", mutates_args=("calls",))
def _look(
    calls: torch.Tensor,
    site: int,
    tensors: list[torch.Tensor],
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> None:
    calls.add_(1)
    given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    for looker in lookers:
        looker(_sites[site], tensors[0], given | dict(zip(("query", "key", "value"), tensors[1:])))
