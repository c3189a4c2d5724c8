"""A function of arrays as the callable side of a kernel, for an output or for gradients: torch tensors or numpy arrays
in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fa3_kernels.plan.config import MAX_HEAD_DIM, Config, OutDtype, default_config
from fa3_reference.cache import Cache, check_written, in_cache, serve
from fa3_reference.problem import AttentionProblem, BackwardOperands, Descale, Floats, Operands
from fa3verify.kernels.handed import unchanged
from fa3verify.kernels.record import always_launchable
from fa3verify.operations import FEATURES
from fa3verify.operations.backward import LSE_GRADIENT, GradientConfig
from fa3verify.operations.forward import Result

Layout = Literal["bhsd", "bshd"]
Library = Literal["torch", "numpy"]
GradientsOf = Literal["", "autograd", "given", "own"]
ARRAY_FEATURES = FEATURES - {"block_descale"} | {LSE_GRADIENT}  # descales are (batch, heads)
_OF_CACHES = frozenset({"paged", "seqused_k"})


def is_plain(x: np.ndarray) -> bool:
    """Tell whether an array is contiguous and begins at an address that vectors of 16 bytes may be read from."""
    return bool(x.flags.c_contiguous) and x.__array_interface__["data"][0] % 16 == 0


@dataclass(frozen=True, slots=True)
class ArrayFunction:
    """The code of a kernel that is one function: a record, so that it can travel to worker processes.

    Parameters
    ----------
    function : callable
        ``function(q, k, v, *, softmax_scale, ...)`` returns ``out`` or ``(out, lse)``. It gets ``causal``, ``window``,
        ``softcap`` if these are among its features; ``cu_seqlens_q``, ``cu_seqlens_k``, ``max_seqlen_q`` and
        ``max_seqlen_k`` for packed sequences; and for e4m3 ``q_descale``, ``k_descale`` and ``v_descale``, float32
        (batch, nheads_kv), or (batch, nheads) for q with ``query_head_descale`` among its features; of those features
        also ``attention_chunk``, ``sinks``, float32 (nheads,), and ``qv``. One that claims ``paged`` or ``seqused_k``
        is a function of caches, ``function(q, k_cache, v_cache, *, cache_seqlens, ...)``: whatever it is asked, it gets
        what :func:`fa3_reference.cache.serve` returns, and ``rotary_interleaved``, in FlashAttention-3's layout and by
        its names, but ``k_new`` and ``v_new``, which it may write into the cache. For gradients that are not
        "autograd", ``function(q, k, v, dout, out, lse, *, softmax_scale, ...)`` returns ``(dq, dk, dv)``, or with
        sinks ``(dq, dk, dv, dsinks)``; of the feature ``lse_gradient`` it gets ``dlse`` where lse has a gradient.
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
    gradients : {"", "autograd", "given", "own"}
        Whether torch's autograd takes the gradients of ``function(q, k, v, ...)``; whether they are of the out and lse
        that are given, or of a forward of its own. Empty for a forward.
    page_size : int
        Keys of a page where a function that claims ``paged``, and not ``seqused_k``, is asked a problem without a
        cache.
    launchable, identity : callable
        As :class:`fa3verify.kernels.record.Code` has them.
    """

    function: Callable[..., object]
    layout: Layout
    library: Library
    device: str
    features: frozenset[str]
    out_dtype: OutDtype | Literal[""]
    gradients: GradientsOf = ""
    page_size: int = 16
    launchable: Callable[..., object] = always_launchable
    identity: Callable[[], Mapping[str, str | None]] = dict

    @property
    def views(self) -> tuple[str, ...]:
        """Return which operands the function gets as they lie in memory, where those of others are copied."""
        is_copied = self.device != "cpu" or self.gradients
        return () if is_copied else ("q",) if self.features & _OF_CACHES else ("q", "k", "v")

    def configure(self, problem: AttentionProblem) -> Config | GradientConfig:
        """Return a configuration that says the formats; of a function nothing else is known.

        Parameters
        ----------
        problem : AttentionProblem
            What is to be computed.

        Returns
        -------
        Config or GradientConfig
            Our default one for the problem, with the function's output format; of gradients what they are of.
        """
        if self.gradients:
            return GradientConfig(problem.dtype, "given" if self.gradients == "given" else "own")
        sizes = {name: min(getattr(problem, name), MAX_HEAD_DIM) for name in ("head_dim", "head_dim_v")}
        plain = replace(problem, **sizes, sinks=False, attention_chunk=0, qv=False, cache=None)
        return default_config(plain, out_dtype=self.out_dtype if problem.dtype == "e4m3" else "")

    def run(
        self, problem: AttentionProblem, operands: Operands, config: Config | GradientConfig
    ) -> Result | tuple[Floats, ...]:
        """Call the function on a problem's operands, in its own library and layout.

        Parameters
        ----------
        problem : AttentionProblem
            What is to be computed.
        operands : Operands
            Arrays in the format of the problem, and descales of e4m3 ones.
        config : Config or GradientConfig
            As :meth:`configure` returned it; a function has no other.

        Returns
        -------
        Result, or a tuple of gradients
            Numpy arrays in the layout of the problem, with the dtypes that the function returned.
        """
        asked = problem
        if self.features & _OF_CACHES:
            pages = 0 if "seqused_k" in self.features else self.page_size
            problem, operands = in_cache(problem, operands, Cache(pages))
        given = serve(problem, operands)
        stored = {name: np.array(x) for name, x in given.items()} if problem.cache is not None else {}
        names = ("q", "k", "v") if problem.cache is None else ("q", "k_cache", "v_cache")
        inputs = {name: self._operand(given.pop(name), problem) for name in names}
        options = self._options(problem, operands) | {name: self._foreign(x) for name, x in given.items()}
        if self.gradients:
            assert isinstance(operands, BackwardOperands)
            inputs["dout"] = self._given(operands.dout, problem)
            if self.gradients != "autograd":
                inputs |= {"out": self._given(operands.out, problem), "lse": self._foreign(operands.lse)}
            options |= {} if operands.dlse is None else {"dlse": self._foreign(operands.dlse)}
        call: Callable[..., Any] = self._by_autograd if self.gradients == "autograd" else self.function
        with unchanged(inputs | options):
            returned = call(*inputs.values(), **options)
        if self.gradients:
            found = tuple(map(self._array, returned))
            return *(self._layout(x, problem) for x in found[:3]), *found[3:]
        out, lse = returned if isinstance(returned, tuple) else (returned, None)
        if stored:
            check_written(problem, operands, stored, (self._array(inputs["k_cache"]), self._array(inputs["v_cache"])))
        return self._result(problem, asked, self._array(out), None if lse is None else self._array(lse))

    def _result(self, problem: AttentionProblem, asked: AttentionProblem, out: np.ndarray, lse: Any) -> Result:
        """Return what a function returned in the layout of the problem that was asked, not of the one it was given."""
        if problem.cache is None:
            return Result(self._layout(out, problem), lse)
        batched = (problem.batch, problem.seqlen_q, problem.nheads, problem.head_dim_v)
        if out.shape == batched:
            out = out.reshape(asked.out_shape)
        if lse is not None and asked.is_varlen and lse.shape == (batched[0], batched[2], batched[1]):
            lse = lse.swapaxes(0, 1).reshape(asked.lse_shape)
        return Result(out, lse)

    def _by_autograd(self, *inputs: Any, **options: Any) -> Any:
        from fa3verify.tensors.convert import gradients_of

        return gradients_of(self.function, inputs[:3], inputs[3], **options)

    def _layout(self, x: np.ndarray, problem: AttentionProblem) -> np.ndarray:
        return x.swapaxes(1, 2) if self.layout == "bhsd" and not problem.is_varlen else x

    def _given(self, x: np.ndarray, problem: AttentionProblem) -> Any:
        return self._foreign(self._layout(x, problem))

    def _foreign(self, x: np.ndarray) -> Any:
        if self.library == "numpy":
            return np.ascontiguousarray(x)
        from fa3verify.tensors.convert import to_torch

        return to_torch(x, self.device)

    def _operand(self, x: np.ndarray, problem: AttentionProblem) -> Any:
        """Return Q, K or V as the function gets it: a view stays a view, with its strides."""
        laid = self._layout(x, problem)
        if is_plain(x) or self.device != "cpu":
            return self._foreign(laid)
        if self.library == "numpy":
            return laid
        from fa3verify.tensors.convert import view_as_torch

        return view_as_torch(laid)

    def _array(self, x: Any) -> np.ndarray:
        if self.library == "numpy":
            return np.asarray(x)
        from fa3verify.tensors.convert import to_numpy

        return to_numpy(x)

    def _options(self, problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
        options: dict[str, Any] = {"softmax_scale": problem.softmax_scale}
        named = ("causal", "window", "softcap", "attention_chunk")
        options |= {name: getattr(problem, name) for name in named if name in self.features}
        if problem.cache is not None:
            options |= {} if problem.has_equal_queries else {"max_seqlen_q": problem.seqlen_q}
            options |= {"rotary_interleaved": problem.cache.interleaved} if problem.cache.rotary_dim else {}
        elif problem.is_varlen:
            starts = {name: self._foreign(getattr(problem, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
            options |= {**starts, "max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
        for name in ("q_descale", "k_descale", "v_descale"):
            descale: Descale | None = getattr(operands, name)
            if descale is not None and descale.block_rows != 1:  # those of single keys lie in the cache
                each = name == "q_descale" and "query_head_descale" in self.features
                options[name] = self._foreign(descale.by_kv_head(problem.nheads if each else problem.nheads_kv))
        return options
