"""How a user's function of torch tensors or numpy arrays is called as a kernel, for an output or for gradients.

Users declare such a function by :mod:`fa3verify.kernels.functions`, which makes kernels of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fa3_kernels.plan.config import MAX_HEAD_DIM, Config, OutDtype, default_config
from fa3_reference.cache import Cache, check_written, in_cache, serve
from fa3_reference.formats import FORMATS
from fa3_reference.merging import MergeOperands
from fa3_reference.problem import Array, AttentionProblem, BackwardOperands, Descale, Floats, Operands
from fa3_reference.score_term import KINDS
from fa3verify.files import Json
from fa3verify.kernels.handed import current, unchanged
from fa3verify.kernels.layouts import CacheLayout, Groups, Packed, adjacent, interleaved, laid, stacked
from fa3verify.kernels.record import always_launchable
from fa3verify.operations import FEATURES, FORWARD
from fa3verify.operations.backward import BIASES, LSE_GRADIENT, GradientConfig
from fa3verify.operations.forward import ForwardConfig, Result
from fa3verify.operations.merge import MergeConfig

Layout = Literal["bhsd", "bshd"]
Library = Literal["torch", "numpy"]
GradientsOf = Literal["", "autograd", "given", "own"]
Merges = Literal["", "parts", "pairs"]
LseBase = Literal["e", 2]
LseLayout = Literal["hs", "sh"]
ARRAY_FEATURES = FEATURES - {"block_descale"} | {LSE_GRADIENT}  # a function gets descales as (batch, heads) only
_OF_CACHES = frozenset({"paged", "seqused_k"})  # a function that claims one of these is always called over a cache
_LN2 = math.log(2)
_GRADIENTS = ("dq", "dk", "dv")
_ARGUMENTS = {  # of terms of scores, by kind; None in a call without the term
    "bias": ("bias",),
    "bias_fp32": ("bias",),
    "attn_mask": ("attn_mask",),
    "key_padding": ("key_padding_mask",),
    "alibi": ("alibi_slopes",),
    "documents": ("document_ids_q", "document_ids_k"),
    "mods": (),
}


@dataclass(frozen=True, slots=True)
class ArrayFunction:
    """The code of a kernel that is one function: a record, so that it can travel to worker processes.

    Parameters
    ----------
    function : callable
        A forward is ``function(q, k, v, *, softmax_scale, ...)`` and returns ``out`` or ``(out, lse)``. It also gets
        each of ``causal``, ``window``, ``softcap``, ``attention_chunk``, ``sinks``, float32 (nheads,) or with
        ``narrow_sinks`` in the operands' format, and ``qv`` that is among its features; ``bias``, ``attn_mask``,
        ``key_padding_mask``, ``alibi_slopes``, ``document_ids_q`` and ``document_ids_k`` by the terms of scores among
        them, None in a call that has no such term; for packed sequences ``cu_seqlens_q``, ``cu_seqlens_k``,
        ``max_seqlen_q`` and ``max_seqlen_k``; and for e4m3 ``q_descale``, ``k_descale`` and ``v_descale``, float32
        (batch, nheads_kv), where that of q is (batch, nheads) if ``query_head_descale`` is among its features.
        A function that claims ``paged`` or ``seqused_k`` is one of caches,
        ``function(q, k_cache, v_cache, *, cache_seqlens, ...)``. For every problem it gets what
        :func:`fa3_reference.cache.serve` returns, and ``rotary_interleaved``. Layout and names are FlashAttention-3's,
        except for ``k_new`` and ``v_new``, which it may write into the cache.
        A function of gradients, unless these are "autograd", is ``function(q, k, v, dout, out, lse, *, softmax_scale,
        ...)`` and returns ``(dq, dk, dv)``, and behind them dsinks in calls with sinks and dbias in calls with a bias,
        where None stands for one that it lacks; with the feature ``lse_gradient`` it gets ``dlse`` where lse has a
        gradient.
        A function that merges "parts" is ``function(outs, lses)`` of arrays with an axis of parts in front; one that
        merges "pairs" is ``function(out_a, lse_a, out_b, lse_b)``, called for one part after the other with what it
        returned. Both return ``(out, lse)``.
    layout : {"bhsd", "bshd"}
        Order of the axes of batched q, k, v and out; packed ones are (tokens, heads, head_dim). lse is (batch, heads,
        seqlen_q), or packed (heads, tokens).
    library : {"torch", "numpy"}
        Whose arrays it takes and returns.
    device : str
        Where torch tensors are made, such as "cpu" or "cuda".
    features : frozenset of str
        What it claims to take: a subset of :data:`ARRAY_FEATURES` and of the features that serve.
    out_dtype : {"", "fp16", "bf16", "fp32"}
        Format of the output of an e4m3 function, where empty stands for bf16, or of one that merges, where empty stands
        for that of the parts. Others return their own format.
    gradients : {"", "autograd", "given", "own"}
        Empty for a forward. "autograd": torch differentiates ``function(q, k, v, ...)``. "given" or "own": the function
        returns gradients, of the out and lse that it gets or of a forward of its own.
    page_size : int
        Keys of a page of the cache that is made for a problem without one, if the function claims ``paged`` and not
        ``seqused_k``.
    merge : {"", "parts", "pairs"}
        Empty for a function that does not merge.
    lse_base : {"e", 2}
        Base of the logarithms that it returns and takes.
    lse_layout : {"hs", "sh"}
        Order of the axes of lse: (batch, heads, seqlen_q) and packed (heads, tokens), or heads last in both.
    cache_layout : {"nhd", "hnd", "vllm"}
        How the cache lies: keys in front of heads, heads in front of keys, or as vLLM's PagedAttention has it: K is
        (pages, heads, channels / n, page_size, n) with n channels of 16 bytes, V (pages, heads, channels, page_size).
    packed : {"", "qkv", "kv"}
        Which of q, k and v are one array, with an axis of 3 or 2 in front of the heads; only in layout "bshd".
    groups : {"adjacent", "interleaved"}
        Whether query heads that share a kv head lie beside each other, or ``nheads_kv`` apart.
    launchable, identity : callable
        As :class:`fa3verify.kernels.record.Code` has them.
    is_handed : bool
        Always, as its arguments are arranged by :mod:`fa3verify.kernels.handed`.
    """

    function: Callable[..., object]
    layout: Layout
    library: Library
    device: str
    features: frozenset[str]
    out_dtype: OutDtype | Literal["", "fp32"]
    gradients: GradientsOf = ""
    page_size: int = 16
    merge: Merges = ""
    lse_base: LseBase = "e"
    lse_layout: LseLayout = "hs"
    cache_layout: CacheLayout = "nhd"
    packed: Packed = ""
    groups: Groups = "adjacent"
    launchable: Callable[..., object] = always_launchable
    identity: Callable[[], Mapping[str, str | None]] = dict
    is_handed: bool = True

    @property
    def operation(self) -> str:
        """Return what it computes: a name in :data:`fa3verify.operations.OPERATIONS`."""
        return "backward" if self.gradients else "merge" if self.merge else FORWARD

    def configure(self, problem: AttentionProblem) -> Config | ForwardConfig | GradientConfig | MergeConfig:
        """Return a configuration of which only the formats are true; nothing else is known of a user's function.

        Parameters
        ----------
        problem : AttentionProblem
            What is to be computed.

        Returns
        -------
        Config, ForwardConfig, GradientConfig or MergeConfig
            Our default one for the problem, with the function's output format; of binary32, which we have none for, the
            formats alone. For gradients a GradientConfig, which says whose forward they belong to.
        """
        if self.merge:
            out_dtype = self.out_dtype or problem.dtype
            return MergeConfig(dtype=problem.dtype, out_dtype=out_dtype, merges_two=self.merge == "pairs")
        if self.gradients:
            return GradientConfig(problem.dtype, "given" if self.gradients == "given" else "own")
        if problem.dtype == "fp32":
            return ForwardConfig()
        # default_config knows neither wider heads nor problems that serve: it gets the plain problem beside this one.
        sizes = {name: min(getattr(problem, name), MAX_HEAD_DIM) for name in ("head_dim", "head_dim_v")}
        plain = replace(problem, **sizes, sinks=False, attention_chunk=0, qv=False, cache=None, term=None)
        return default_config(plain, out_dtype=self.out_dtype if problem.dtype == "e4m3" else "")

    def run(
        self,
        problem: AttentionProblem,
        operands: Operands,
        config: Config | ForwardConfig | GradientConfig | MergeConfig,
    ) -> Result | dict[str, Floats]:
        """Call the function on a problem's operands, in its own library and layout.

        Parameters
        ----------
        problem : AttentionProblem
            What is to be computed.
        operands : Operands
            Arrays in the format of the problem, and descales of e4m3 ones.
        config : Config, ForwardConfig, GradientConfig or MergeConfig
            As :meth:`configure` returned it; a function has no other.

        Returns
        -------
        Result, or a tuple of gradients
            Numpy arrays in the layout of the problem, with the dtypes that the function returned.

        Raises
        ------
        WrongOutput
            If the function changed an operand.
        RuntimeError
            If it left another cache than it should. Whatever the function itself raises passes through.
        """
        if isinstance(operands, MergeOperands) and isinstance(config, MergeConfig):
            return self._merged(problem, operands, config)
        if self.groups == "interleaved":
            found: Any = replace(self, groups="adjacent").run(problem, interleaved(problem, operands), config)
            return Result(adjacent(problem, found.out), adjacent(problem, found.lse))
        original = problem
        if self.features & _OF_CACHES:
            pages = 0 if "seqused_k" in self.features else self.page_size
            problem, operands = in_cache(problem, operands, Cache(pages))
        arrays = serve(problem, operands)
        if "sinks" in arrays and "narrow_sinks" in self.features:
            arrays["sinks"] = arrays["sinks"].astype(operands.q.dtype)  # exact, as Kernel.given rounded them
        stored = {name: np.array(x) for name, x in arrays.items()} if problem.cache is not None else {}
        names = ("q", "k", "v") if problem.cache is None else ("q", "k_cache", "v_cache")
        given = {name: laid(self.cache_layout, name, arrays.pop(name)) for name in names}
        inputs = {name: self._given(x, problem) for name, x in stacked(self.packed, given).items()}
        if "qv" in arrays:
            arrays["qv"] = self._layout(arrays["qv"], problem)
        options = self._options(problem, operands) | {name: self._foreign(x) for name, x in arrays.items()}
        if self.gradients:
            assert isinstance(operands, BackwardOperands)
            inputs["dout"] = self._given(operands.dout, problem)
            if self.gradients != "autograd":
                inputs |= {"out": self._given(operands.out, problem), "lse": self._given_lse(operands.lse)}
            options |= {} if operands.dlse is None else {"dlse": self._given_lse(operands.dlse)}
        call: Callable[..., Any] = self._by_autograd if self.gradients == "autograd" else self.function
        inputs, returned = self._handed(call, problem, inputs, options)
        if self.gradients:
            named = [*_GRADIENTS, *(f"d{name}" for name in ("sinks", *BIASES) if name in problem.serving)]
            gradients = {name: self._array(x) for name, x in zip(named, returned) if x is not None}
            return gradients | {
                name: self._layout(gradients[name], problem) for name in _GRADIENTS if name in gradients
            }
        out, lse = returned if isinstance(returned, tuple) else (returned, None)
        if stored:
            k_cache, v_cache = (laid(self.cache_layout, x, self._array(inputs[x]), back=True) for x in names[1:])
            check_written(problem, operands, stored, (k_cache, v_cache))
        return self._result(
            problem, original, self._array(out), None if lse is None else self._lse(self._array(lse), _LN2)
        )

    def _handed(
        self, call: Callable[..., Any], problem: AttentionProblem, inputs: Json, options: Json
    ) -> tuple[Json, Any]:
        """Call the function on its arguments as they are arranged; return the positional ones, and what it returned."""
        arrangement = current()
        arguments = arrangement.given = arrangement.give(inputs | options)
        inputs, options = ({name: arguments[name] for name in names} for names in (inputs, options))
        with unchanged(arguments):
            returned = arrangement.returned = arrangement.call(lambda: call(*inputs.values(), **options))
        return inputs, self._without_slack(problem, returned) if arrangement.slack else returned

    def _without_slack(self, problem: AttentionProblem, returned: Any) -> Any:
        """Return packed outputs, or gradients, without the tokens behind the last sequence."""
        queries, keys = problem.q_shape[0], problem.k_shape[0]
        if self.gradients:
            return tuple(x[:n] for x, n in zip(returned, (queries, keys, keys)))
        if not isinstance(returned, tuple):
            return returned[:queries]
        out, lse = returned
        return out[:queries], lse[:queries] if self.lse_layout == "sh" else lse[..., :queries]

    def _merged(self, problem: AttentionProblem, operands: MergeOperands, config: MergeConfig) -> Result:
        """Merge parts in one call, or two at a time in their order; the only part of all is returned as it is."""
        outs, lses = self._given(operands.outs, problem), self._given_lse(operands.lses)
        if self.merge == "parts":
            out, lse = self._called(outs=outs, lses=lses)
        else:
            out, lse = outs[0], lses[0]
            for o, own in zip(outs[1:], lses[1:], strict=True):
                out, lse = self._called(out_a=out, lse_a=lse, out_b=o, lse_b=own)
        out = self._layout(self._array(out), problem)
        if config.merges_two and config.parts == 1:
            out = out.astype(FORMATS[config.out_dtype].dtype)
        return Result(out, self._lse(self._array(lse), _LN2))

    def _called(self, **given: Any) -> Any:
        with unchanged(given):
            return self.function(*given.values())

    def _result(self, problem: AttentionProblem, original: AttentionProblem, out: np.ndarray, lse: Any) -> Result:
        """Return outputs in the layout of the original problem, which may be packed where the call over a cache is not.

        An array of another shape stays as it is: its operation then refuses it.
        """
        if problem.cache is None:
            return Result(self._layout(out, problem), lse)
        batched = (problem.batch, problem.seqlen_q, problem.nheads, problem.head_dim_v)
        if out.shape == batched:
            out = out.reshape(original.out_shape)
        if lse is not None and original.is_varlen and lse.shape == (batched[0], batched[2], batched[1]):
            lse = lse.swapaxes(0, 1).reshape(original.lse_shape)
        return Result(out, lse)

    def _by_autograd(self, *inputs: Any, **options: Any) -> Any:
        from fa3verify.tensors.convert import gradients_of

        asked = current()
        return gradients_of(self.function, inputs[:3], inputs[3], asked.frozen, asked.times, **options)

    def _layout(self, x: np.ndarray, problem: AttentionProblem) -> np.ndarray:
        """Swap heads and sequence where the layout is bhsd; the same call goes either way."""
        return x.swapaxes(-3, -2) if self.layout == "bhsd" and not problem.is_varlen else x

    def _given(self, x: np.ndarray, problem: AttentionProblem) -> Any:
        return self._foreign(self._layout(x, problem))

    def _given_lse(self, lse: np.ndarray) -> Any:
        return self._foreign(self._lse(lse, 1 / _LN2))

    def _lse(self, lse: np.ndarray, unit: float) -> np.ndarray:
        """Swap heads and sequence of an lse if the function has heads last, and take it from or to base 2 by ``unit``,
        with one rounding."""
        laid = lse.swapaxes(-1, -2) if self.lse_layout == "sh" and lse.ndim > 1 else lse
        return (laid.astype(np.float64) * unit).astype(lse.dtype) if self.lse_base == 2 else laid

    def _foreign(self, x: np.ndarray) -> Any:
        if self.library == "numpy" and not x.size:  # numpy gives it strides of 0, which kernels refuse
            return np.empty([max(n, 1) for n in x.shape], x.dtype)[tuple(map(slice, x.shape))]
        if self.library == "numpy":
            return np.ascontiguousarray(x)
        from fa3verify.tensors.convert import to_torch

        return to_torch(x, self.device)

    def _array(self, x: Any) -> np.ndarray:
        if self.library == "numpy":
            return np.asarray(x)
        from fa3verify.tensors.convert import to_numpy

        return to_numpy(x)

    def _options(self, problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
        """Return the keywords of a call that are no arrays of :func:`fa3_reference.cache.serve`."""
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
        return options | self._terms(problem, operands)

    def _terms(self, problem: AttentionProblem, operands: Operands) -> dict[str, Array | None]:
        """Return the keywords of all terms of scores that the function takes, None but for that of the problem."""
        options: dict[str, Array | None] = dict.fromkeys(
            name for kind in KINDS if kind in self.features for name in _ARGUMENTS[kind]
        )
        if problem.term is not None and operands.term is not None and _ARGUMENTS[problem.term.kind]:
            names = _ARGUMENTS[problem.term.kind]  # of documents those of the queries come first
            arrays = np.split(operands.term, [problem.seqlen_q], axis=1) if len(names) > 1 else (operands.term,)
            options |= dict(zip(names, map(self._foreign, arrays), strict=True))
        return options
