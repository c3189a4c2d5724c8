"""Where a model rounds, and by how much that moves its log-probabilities: predicted from two backward passes.

A number that is rounded to nearest is off by an error of known deviation: its spacing over the root of 12. Behind every
such number of a run in binary32 stands the identity, whose backward adds up (gradient x deviation)^2. With random signs
over the tokens one backward gives the mean over all of them, by place, layer and head. Nothing is fitted, and no list
of operations is needed: a result is rounded if the same call on the same numbers in binary32 returns another one.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fa3_reference.bounds.quantisation import EPS_E4M3
from fa3_reference.problem import Dtype
from fa3_reference.quantize import QuantScheme
from fa3_reference.scales import random_signs, rotate
from fa3verify.models.attention import Attention, ExactAttention, LayerCall, attending

TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
_NARROW = (torch.bfloat16, torch.float16)
_P_OFFSET = 256.0  # by which a kernel of e4m3 multiplies P, so that small weights are no subnormals


Results = Sequence[tuple[str, torch.dtype | None]]  # of a model: the function, and the format of what was rounded


class Place(NamedTuple):
    """Where numbers are rounded: a layer (-1 for none), a module of it with what it calls, and a head (-1 for none).

    Heads of k and v are kv heads.
    """

    layer: int
    where: str
    head: int = -1


def deviation(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the standard deviation of rounding numbers of binary32 to nearest in a format; 0 is exact.

    It is the spacing, 2^floor(log2 |x|) times the format's epsilon, over the root of 12.
    """
    info = torch.finfo(dtype)
    powers = (x.float().view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=info.smallest_normal)
    return torch.where(x == 0, 0, powers * (info.eps / math.sqrt(12)))


# How numbers are rounded: their standard deviations, of the numbers ``x @ turn`` if there is one.
Rounding = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor | None]
Roundings = Mapping[str, Rounding]  # by the format of attention; of everything else under ""
Visit = Callable[[torch.Tensor, Sequence[Place], Roundings], torch.Tensor]  # a place for each slice of dimension 1
Variances = Counter[Place]


class _Site(torch.autograd.Function):
    """The identity, whose backward tells of the gradient and the numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Callable[[torch.Tensor, torch.Tensor], None]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell(gradients[0], *ctx.saved_tensors)
        return gradients[0], None


class SitedAttention(ExactAttention):
    """Exact attention in binary32, where ``visit`` stands behind what kernels of some formats round.

    Operands are rounded where the model has them in another format; those of e4m3 are scaled by its scheme.
    """

    def __init__(self, visit: Visit, schemes: Mapping[str, QuantScheme | None], rest: Dtype) -> None:
        super().__init__(torch.float32)
        self._visit = visit
        self._schemes = schemes
        self._rest = rest

    def site(self, layer: int, first: int, name: str, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        roundings = {
            dtype: self._rounding(dtype, name, x, scale)
            for dtype in self._schemes
            if name not in "qkv" or dtype == "e4m3" or dtype != self._rest
        }
        places = [Place(layer, f"attention {name}", first + i) for i in range(x.shape[1])]
        return self._visit(x, places, roundings)

    def of_kv_head(self, kv: int, asked: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        """Return what exact attention does; gradients compute the scores again, as those of all layers are many GB."""
        return checkpoint(super().of_kv_head, kv, asked, hidden, use_reentrant=False, preserve_rng_state=False)

    def _rounding(self, dtype: str, name: str, x: torch.Tensor, scale: torch.Tensor | None) -> Rounding:
        if scale is not None:  # P is rounded beside the largest weight of its row, which is 1 and exact
            return partial(_deviation_of_p, scale=scale, dtype=dtype), None
        if dtype != "e4m3" or name == "out":
            return partial(deviation, dtype=TORCH["bf16" if dtype == "e4m3" else dtype]), None
        scheme = self._schemes[dtype]
        seed = scheme.hadamard_seed if scheme and name in "qk" else None
        turn = None if seed is None else rotate(np.eye(x.shape[-1]), random_signs(x.shape[-1], seed))
        return lambda x: x.abs() * EPS_E4M3, None if turn is None else torch.as_tensor(turn).to(x)


def _deviation_of_p(p: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    factor = (_P_OFFSET if dtype == "e4m3" else 1) / scale
    return torch.where(p < scale, deviation(p * factor, TORCH[dtype]) / factor, 0)


@contextlib.contextmanager
def _followed(model: PreTrainedModel) -> Iterator[Callable[[str], Place]]:
    """Yield what returns the place of a call in the module that runs; the first number in its name is the layer."""
    running = [""]

    def place(call: str) -> Place:
        before, layer, behind = re.fullmatch(r"(.*?)(?:\.(\d+)(?:\.|$)(.*))?", running[-1]).groups()  # type: ignore[union-attr]
        return Place(-1 if layer is None else int(layer), f"{(before if layer is None else behind)} {call}".strip())

    names = {module: name for name, module in model.named_modules()}
    with (
        register_module_forward_pre_hook(lambda module, _: running.append(names.get(module, running[-1]))),
        register_module_forward_hook(lambda *_: running.__delitem__(-1), always_call=True),
    ):
        yield place


def differentiable(model: PreTrainedModel) -> RemovableHandle:
    """Have gradients begin at a model's embeddings, as long as the context of what is returned."""
    # A method in place of setattr would be one of the results that are counted.
    return model.get_input_embeddings().register_forward_hook(lambda _, __, out: setattr(out, "requires_grad", True))


class Looking(TorchFunctionMode):
    """Hands every result of torch's functions, the function and its arguments to another one, whose result counts."""

    def __init__(self, look: Callable[..., Any]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            return self._look(out, func, args, kwargs or {})


def _is_counted(out: object) -> bool:
    return isinstance(out, torch.Tensor) and out.is_floating_point()


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _widened(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.float() if x.dtype in _NARROW else x
    return torch.float32 if x in _NARROW else x


def _rounded_to(out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the format that a result was rounded to; None for one that binary32 returns as well."""
    if out.dtype in _NARROW and not _name(func).endswith("_"):  # what works in place has been changed already
        with contextlib.suppress(RuntimeError):
            wide = func(*pytree.tree_map(_widened, args), **pytree.tree_map(_widened, kwargs))
            return out.dtype if wide.shape == out.shape and not torch.equal(wide.float(), out.float()) else None
    return None


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of every token but the first, (tokens - 1,), from the logits of all."""
    return -torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")


@lru_cache(4)
def recorded(narrow: PreTrainedModel, tokens: torch.Tensor, attention: str = "") -> Results:
    """Return the results of a model in 16 bits, with an attention of Transformers that is named or an exact one, and
    which of them were rounded."""
    results: list[tuple[str, torch.dtype | None]] = []

    def look(out: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_counted(out):
            results.append((_name(func), _rounded_to(out, func, args, kwargs)))
        return out

    with torch.no_grad(), attending(narrow, attention or ExactAttention(torch.float32)), Looking(look):
        narrow(tokens[None], use_cache=False)
    return results


class Rounded(NamedTuple):
    """What is rounded in a run: a model in binary32, and the ``results`` of the same model in 16 bits, of
    :func:`recorded`.

    ``attention`` makes the attention that has its numbers visited, of kernels of ``formats``; or it is the name of a
    function of Transformers, which is then the one format.
    """

    wide: PreTrainedModel
    results: Results
    attention: Callable[[Visit], Attention] | str
    formats: Collection[str]

    def run(self, tokens: torch.Tensor, visit: Visit) -> torch.Tensor:
        """Return the log-probabilities of a run in binary32, in which every number that is rounded is visited."""
        results = iter(self.results)

        def look(out: Any, func: Any, *_: Any) -> Any:
            if not (self.results and _is_counted(out)):
                return out
            name, dtype = next(results, ("nothing", None))
            if name != _name(func):
                raise ValueError(f"in 16 bits the model calls {name} where it calls {_name(func)} in binary32")
            return out if dtype is None else visit(out, [place(name)], {"": (partial(deviation, dtype=dtype), None)})

        attention = self.attention if isinstance(self.attention, str) else self.attention(visit)
        with attending(self.wide, attention), _followed(self.wide) as place, Looking(look):
            out = self.wide(tokens[None], use_cache=False)
        return logprobs_of(out.logits[0], tokens)


def predicted(rounded: Rounded, tokens: torch.Tensor, *, draws: int = 2, seed: int = 0) -> dict[str, Variances]:
    """Return the predicted variance of a token's log-probability by format and place, in nats^2, the mean over tokens.

    Parameters
    ----------
    rounded : Rounded
    tokens : int64 tensor (tokens,)
    draws : int
        Backward passes, each with signs of its own.

    Raises
    ------
    ValueError
        If the model calls other functions in 16 bits than in binary32.
    """
    found: dict[str, Variances] = defaultdict(Counter)
    random = torch.Generator().manual_seed(seed)
    count = draws * (len(tokens) - 1)

    def visit(x: torch.Tensor, places: Sequence[Place], roundings: Roundings) -> torch.Tensor:
        def tell(gradient: torch.Tensor, numbers: torch.Tensor) -> None:
            for key, (deviation_of, turn) in roundings.items():
                g, n = (gradient, numbers) if turn is None else (gradient @ turn, numbers @ turn)
                squares = (g * deviation_of(n)).square().reshape(len(places), -1).sum(1) / count
                found[key].update(dict(zip(places, squares.tolist(), strict=True)))

        return _Site.apply(x, tell) if x.requires_grad else x  # type: ignore[return-value]

    with differentiable(rounded.wide):
        for _ in range(draws):
            logprobs = rounded.run(tokens, visit)
            signs = torch.randint(0, 2, logprobs.shape, generator=random) * 2 - 1
            (logprobs * signs.to(logprobs)).sum().backward()
    return {key: found[""] + found[key] for key in rounded.formats}


def deviations(rounded: Rounded, tokens: torch.Tensor, *, runs: int = 8, seed: int = 0) -> np.ndarray:
    """Return by which standard deviation rounding moves each token's log-probability, in nats, float64 (tokens - 1,).

    It is that of runs in which every number that is rounded is moved at random, by what rounding moves it; routers
    pick other experts there, too. A few runs leave some tokens with far too small a variance, so that each is drawn a
    third of the way to the mean of all.

    Parameters
    ----------
    rounded : Rounded
        Of one format.
    tokens : int64 tensor (tokens,)
    runs : int
        At least two.

    Raises
    ------
    ValueError
        If the model calls other functions in 16 bits than in binary32.
    """
    random = torch.Generator(tokens.device).manual_seed(seed)

    def visit(x: torch.Tensor, _places: Sequence[Place], roundings: Roundings) -> torch.Tensor:
        for deviation_of, turn in roundings.values():
            x = x if turn is None else x @ turn
            uniform = torch.rand(x.shape, generator=random, device=x.device) * 2 - 1
            x = x + deviation_of(x) * uniform * math.sqrt(3)
            x = x if turn is None else x @ turn.mT
        return x

    with torch.no_grad():
        squares = torch.stack([rounded.run(tokens, visit) for _ in range(runs)]).double().var(0)
    return torch.lerp(squares, squares.mean(), 1 / 3).sqrt().numpy(force=True)
