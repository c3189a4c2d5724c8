"""A user's function of arrays as a candidate: torch tensors or numpy arrays in and out, a few facts declared.

    from fa3verify.adapters.functions import torch_candidate

    def mine():
        return torch_candidate(my_attention, dtypes=("bf16",), layout="bhsd", features=("causal", "gqa"))

``fa3verify verify mymodule:mine`` judges it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

import numpy as np

from fa3_kernels.plan.config import Config, OutDtype, default_config
from fa3_reference.bounds import BackwardModel, KernelModel
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Dtype, Operands
from fa3verify import operations
from fa3verify.candidates import FEATURES, Accumulator, Candidate, Result
from fa3verify.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ArrayFunction", "CandidateFacts", "FunctionFacts", "KernelFacts", "array_candidate", "torch_candidate"]
Layout = Literal["bhsd", "bshd"]
Library = Literal["torch", "numpy"]
GradientsOf = Literal["", "autograd", "given", "own"]
ARRAY_FEATURES = FEATURES - {"block_descale"}  # descales are (batch, heads)


class CandidateFacts(TypedDict, total=False):
    """What may be said of a function beside its arrays, each as :class:`fa3verify.candidates.Candidate` holds it."""

    features: Iterable[str]
    bitwise: Iterable[str]
    description: str
    order: Callable[[Any], KernelModel | BackwardModel]
    accumulator: Accumulator | None
    policy: Policy
    head_dims: tuple[int, ...] | None
    seqlen_multiple: int
    min_seqlen: int
    changeable: frozenset[str]
    fixes_config: bool
    launchable: Callable[..., object]
    identity: Callable[[], Mapping[str, str | None]]
    twin: str | None
    unavailable: str | None


class FunctionFacts(CandidateFacts, total=False):
    """What :func:`torch_candidate` may be told beside the device, as :func:`array_candidate` takes it."""

    dtypes: Iterable[Dtype]
    name: str
    layout: Layout
    out_dtype: OutDtype | Literal[""]
    gradients: GradientsOf


class KernelFacts(FunctionFacts, total=False):
    """What :func:`fa3verify.kernel` may be told of the function below it, as :func:`array_candidate` takes it."""

    library: Library
    device: str


@dataclass(frozen=True, slots=True)
class ArrayFunction:
    """The callable side of a candidate: a record, so that it can travel to worker processes.

    Parameters
    ----------
    function : callable
        ``function(q, k, v, *, softmax_scale, ...)`` returns ``out`` or ``(out, lse)``. It gets ``causal``, ``window``,
        ``softcap`` if these are among its features; ``cu_seqlens_q``, ``cu_seqlens_k``, ``max_seqlen_q`` and
        ``max_seqlen_k`` for packed sequences; and for e4m3 ``q_descale``, ``k_descale`` and ``v_descale``, float32
        (batch, nheads_kv), or (batch, nheads) for q with ``query_head_descale`` among its features.
    layout : {"bhsd", "bshd"}
        Of batched q, k, v and out; packed ones are (tokens, heads, head_dim). lse is (batch, heads, seqlen_q) or
        (heads, tokens).
    library : {"torch", "numpy"}
        Whose arrays it takes and returns.
    device : str
        Where torch tensors are made, such as "cpu" or "cuda".
    features : frozenset of str
        What it claims to take, a subset of :data:`ARRAY_FEATURES`.
    out_dtype : {"", "fp16", "bf16"}
        Format of the output of an e4m3 function; empty for bf16, and for the own format of 16-bit ones.
    """

    function: Callable[..., object]
    layout: Layout
    library: Library
    device: str
    features: frozenset[str]
    out_dtype: str

    def configure(self, problem: AttentionProblem) -> Config:
        """Return a configuration that says the formats; of a function nothing else is known.

        Parameters
        ----------
        problem : AttentionProblem
            What is to be computed.

        Returns
        -------
        Config
            Our default one for the problem, with the function's output format.
        """
        changes: dict[str, Any] = {"out_dtype": self.out_dtype} if self.out_dtype else {}
        return default_config(problem, **changes)

    def run(self, problem: AttentionProblem, operands: Operands, config: Config) -> Result:
        """Call the function on a problem's operands, in its own library and layout.

        Parameters
        ----------
        problem : AttentionProblem
            What is to be computed.
        operands : Operands
            Arrays in the format of the problem, and descales of e4m3 ones.
        config : Config
            As :meth:`configure` returned it; a function has no other.

        Returns
        -------
        Result
            Numpy arrays in the layout of the problem, with the dtypes that the function returned.
        """
        q, k, v = (self._given(x, problem) for x in (operands.q, operands.k, operands.v))
        returned = self.function(q, k, v, **self._options(problem, operands))
        out, lse = returned if isinstance(returned, tuple) else (returned, None)
        return Result(self._layout(self._array(out), problem), None if lse is None else self._array(lse))

    def _layout(self, x: np.ndarray, problem: AttentionProblem) -> np.ndarray:
        return x.swapaxes(1, 2) if self.layout == "bhsd" and not problem.is_varlen else x

    def _given(self, x: np.ndarray, problem: AttentionProblem) -> Any:
        return self._foreign(self._layout(x, problem))

    def _foreign(self, x: np.ndarray) -> Any:
        if self.library == "numpy":
            return np.ascontiguousarray(x)
        from fa3verify.adapters.tensors import to_torch

        return to_torch(x, self.device)

    def _array(self, x: Any) -> np.ndarray:
        if self.library == "numpy":
            return np.asarray(x)
        from fa3verify.adapters.tensors import to_numpy

        return to_numpy(x)

    def _options(self, problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
        options: dict[str, Any] = {"softmax_scale": problem.softmax_scale}
        options |= {name: getattr(problem, name) for name in ("causal", "window", "softcap") if name in self.features}
        if problem.is_varlen:
            starts = {name: self._foreign(getattr(problem, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
            options |= {**starts, "max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
        for name in ("q_descale", "k_descale", "v_descale"):
            descale: Descale | None = getattr(operands, name)
            if descale is not None:
                each = name == "q_descale" and "query_head_descale" in self.features
                options[name] = self._foreign(descale.by_kv_head(problem.nheads if each else problem.nheads_kv))
        return options


def array_candidate(
    function: Callable[..., object],
    *,
    dtypes: Iterable[Dtype] = ("fp16",),
    name: str = "",
    layout: Layout = "bhsd",
    out_dtype: OutDtype | Literal[""] = "",
    library: Library = "numpy",
    device: str = "cpu",
    gradients: GradientsOf = "",
    **facts: Unpack[CandidateFacts],
) -> tuple[Candidate, ...]:
    """Make candidates of a function, one per dtype, named ``NAME.DTYPE``, or ``NAME.backward.DTYPE``.

    Parameters
    ----------
    function : callable
        As :class:`ArrayFunction` calls it, or for gradients
        :class:`fa3verify.adapters.gradients.GradientFunction`.
    dtypes : iterable of {"fp16", "bf16", "e4m3"}
        Formats of the operands that it takes; there is one candidate for each.
    name : str
        What the candidates are called in front of their format, by default the function's own name.
    layout : {"bhsd", "bshd"}
        Of batched arrays, as :class:`ArrayFunction` says.
    out_dtype : {"", "fp16", "bf16"}
        Of an e4m3 function's output, bf16 by default; others return their own format.
    library : {"torch", "numpy"}
        Whose arrays it takes and returns. Numpy ones of bf16 and e4m3 have the dtypes of ml_dtypes.
    device : str
        Where torch tensors are made, such as "cpu" or "cuda".
    gradients : {"", "autograd", "given", "own"}
        Judge gradients, not an output: those that torch's autograd takes of it, or that it computes, of the out and lse
        that it is given or of a forward of its own.
    **facts : CandidateFacts
        What else :class:`fa3verify.candidates.Candidate` holds, above all ``features`` (causal and gqa by default),
        ``order``, ``accumulator``, ``policy``, ``head_dims``, ``seqlen_multiple``, ``min_seqlen`` and ``bitwise``, of
        which nothing is claimed by default. Without ``order`` the bound is that of any order, with the sums that
        ``accumulator`` or else the device says.

    Returns
    -------
    tuple of Candidate
        One for each dtype, in their order.

    Raises
    ------
    ValueError
        For a misspelt fact, dtype, layout, feature, property, accumulator or kind of gradients, with the list of those
        that exist; for "autograd" of a function that is not of torch tensors; for an accumulator beside an order.

    Examples
    --------
    >>> def mine(q, k, v, *, softmax_scale, causal): ...
    >>> [candidate.name for candidate in array_candidate(mine, dtypes=("fp16", "bf16"), features=("causal",))]
    ['mine.fp16', 'mine.bf16']
    """
    if unknown := sorted(facts.keys() - CandidateFacts.__annotations__.keys()):
        known = ", ".join(sorted(KernelFacts.__annotations__))
        raise ValueError(f"{unknown[0]} is no fact of a kernel; known are {known}")
    operation = "backward" if gradients else operations.FORWARD
    taken = ARRAY_FEATURES & operations.find(operation).features
    rest: dict[str, Any] = dict(facts)
    features = frozenset(rest.pop("features", ("causal", "gqa")))
    bitwise = rest.pop("bitwise", ())
    for value, known, what in (
        *((dtype, DTYPES, "dtype") for dtype in dtypes),
        *((feature, sorted(taken), "feature") for feature in sorted(features)),
        *((law, invariant_laws(), "bitwise") for law in bitwise),
        (layout, get_args(Layout), "layout"),
        (gradients, get_args(GradientsOf), "gradients"),
    ):
        if value not in known:
            raise ValueError(f"{what} must be among {', '.join(known)}, got {value!r}")
    if gradients == "autograd" and library != "torch":
        raise ValueError(f"autograd is torch's: the library must be torch, got {library}")
    side: Any = ArrayFunction(function, layout, library, device, features, out_dtype)
    title = name or getattr(function, "__name__", "function")
    if gradients:
        from fa3verify.adapters.gradients import GradientFunction

        side = GradientFunction(function, layout, library, device, features, out_dtype, gradients)
        title = f"{title}.backward"
        rest = {"min_seqlen": 1, **rest}
    return tuple(
        Candidate(
            f"{title}.{dtype}", dtype, side.run, side.configure, features, bitwise=frozenset(bitwise),
            operation=operation, device=device, **rest,
        )
        for dtype in dtypes
    )  # fmt: skip


def torch_candidate(
    function: Callable[..., object], *, device: str = "cpu", **facts: Unpack[FunctionFacts]
) -> tuple[Candidate, ...]:
    """Make candidates of a function of torch tensors on a device; the rest is as in :func:`array_candidate`.

    Parameters
    ----------
    function : callable
        As in :func:`array_candidate`, of torch tensors.
    device : str
        Where its tensors are made, such as "cpu" or "cuda".
    **facts : FunctionFacts
        The rest, as in :func:`array_candidate`.

    Returns
    -------
    tuple of Candidate
        One for each dtype, in their order.

    Raises
    ------
    ValueError
        As :func:`array_candidate` does.

    Examples
    --------
    >>> def mine(q, k, v, *, softmax_scale): ...
    >>> [candidate.device for candidate in torch_candidate(mine, device="cuda", features=())]
    ['cuda']
    """
    return array_candidate(function, library="torch", device=device, **facts)


def invariant_laws() -> tuple[str, ...]:
    """Names of the properties whose bits a kernel may claim."""
    from fa3verify.properties import LAWS

    return tuple(law.name for law in LAWS if law.kind in ("invariant", "agreement"))
