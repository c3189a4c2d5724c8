"""A user's function of arrays as a candidate: torch tensors or numpy arrays in and out, a few facts declared.

    from fa3verify.adapters.functions import torch_candidate

    def mine():
        return torch_candidate(my_attention, dtypes=("bf16",), layout="bhsd", features=("causal", "gqa"))

``fa3verify verify mymodule:mine`` judges it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fa3_kernels.plan.config import Config, default_config
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Dtype, Operands
from fa3verify import operations
from fa3verify.candidates import FEATURES, Candidate, Result

Layout = Literal["bhsd", "bshd"]
Library = Literal["torch", "numpy"]
GradientsOf = Literal["", "autograd", "given", "own"]
ARRAY_FEATURES = FEATURES - {"block_descale"}  # descales are (batch, heads)


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
    """

    function: Callable[..., Any]
    layout: Layout
    library: Library
    device: str
    features: frozenset[str]
    out_dtype: str

    def configure(self, problem: AttentionProblem) -> Config:
        """A configuration that says the formats; of a function nothing else is known."""
        changes: dict[str, Any] = {"out_dtype": self.out_dtype} if self.out_dtype else {}
        return default_config(problem, **changes)

    def run(self, problem: AttentionProblem, operands: Operands, config: Config) -> Result:
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
    function: Callable[..., Any],
    *,
    dtypes: Iterable[Dtype] = ("fp16",),
    name: str = "",
    layout: Layout = "bhsd",
    out_dtype: str = "",
    library: Library = "numpy",
    device: str = "cpu",
    gradients: GradientsOf = "",
    **facts: Any,
) -> tuple[Candidate, ...]:
    """Make candidates of a function, one per dtype, named ``NAME.DTYPE``, or ``NAME.backward.DTYPE``.

    Parameters
    ----------
    function : callable
        As :class:`ArrayFunction` calls it, or for gradients
        :class:`fa3verify.adapters.gradients.GradientFunction`.
    gradients : {"", "autograd", "given", "own"}
        Judge gradients, not an output: those that torch's autograd takes of it, or that it computes, of the out and lse
        that it is given or of a forward of its own.
    out_dtype : {"", "fp16", "bf16"}
        Of an e4m3 function's output, bf16 by default; others return their own format.
    facts
        What else :class:`fa3verify.candidates.Candidate` holds, above all ``features`` (causal and gqa by default),
        ``order``, ``accumulator``, ``policy``, ``head_dims``, ``seqlen_multiple``, ``min_seqlen`` and ``bitwise``, of
        which nothing is claimed by default. Without ``order`` the bound is that of any order, with the sums that
        ``accumulator`` or else the device says.

    Raises
    ------
    ValueError
        For a misspelt dtype, layout, feature, property, accumulator or kind of gradients, with the list of those that
        exist; for "autograd" of a function that is not of torch tensors; for an accumulator beside an order.
    """
    operation = "backward" if gradients else operations.FORWARD
    taken = ARRAY_FEATURES & operations.find(operation).features
    features = frozenset(facts.pop("features", ("causal", "gqa")))
    bitwise = facts.pop("bitwise", ())
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
        title, facts = f"{title}.backward", {"min_seqlen": 1, **facts}
    return tuple(
        Candidate(
            f"{title}.{dtype}", dtype, side.run, side.configure, features, bitwise=frozenset(bitwise),
            operation=operation, device=device, **facts,
        )
        for dtype in dtypes
    )  # fmt: skip


def torch_candidate(function: Callable[..., Any], *, device: str = "cpu", **facts: Any) -> tuple[Candidate, ...]:
    """Make candidates of a function of torch tensors on a device; the rest is as in :func:`array_candidate`."""
    return array_candidate(function, library="torch", device=device, **facts)


def invariant_laws() -> tuple[str, ...]:
    """Names of the properties whose bits a kernel may claim."""
    from fa3verify.properties import LAWS

    return tuple(law.name for law in LAWS if law.kind in ("invariant", "agreement"))
