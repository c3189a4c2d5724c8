"""What a function of arrays is handed over: nothing but what comes with the features that it declares.

A kernel gets the problems whose needs it declares, so that what it is handed must come with what the problem needs:
then no choice of features has an argument too many.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3_reference.score_term import KINDS
from fa3verify.cases import space
from fa3verify.cases.dimensions import DIMENSIONS
from fa3verify.inputs.terms import format_of
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from fa3verify.operations.operation import FEATURES, SERVING, needed_features

# As docs/your-kernel.md says it.
WITH = {
    "causal": {"causal"},
    "window": {"window"},
    "softcap": {"softcap"},
    "varlen": {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"},
    "sinks": {"sinks"},
    "attention_chunk": {"attention_chunk"},
    "qv": {"qv"},
    "paged": {"cache_seqlens", "page_table"},
    "seqused_k": {"cache_seqlens"},
    "append": {"k_new", "v_new", "cu_seqlens_k_new"},
    "rotary": {"rotary_cos", "rotary_sin", "rotary_interleaved"},
    "fp8_cache": {"k_descale", "v_descale"},
    "fp8_rows": {"k_descale", "v_descale"},
    "leftpad": {"cache_leftpad"},
    "batch_idx": {"cache_batch_idx"},
    "bias": {"bias"},
    "bias_fp32": {"bias"},
    "attn_mask": {"attn_mask"},
    "key_padding": {"key_padding_mask"},
    "alibi": {"alibi_slopes"},
    "documents": {"document_ids_q", "document_ids_k"},
}


class Called(Exception):
    """Ends a call at what it was handed."""


def stop(*arrays, **given):
    raise Called(*given)


def kernel(features: frozenset[str]) -> Kernel:
    """A kernel that declares just these features."""
    (kernel,) = array_kernel(stop, dtypes=("bf16",), layout="bshd", features=features, head_dims=(192,))
    return kernel


def handed(features: frozenset[str], problem: AttentionProblem) -> set[str]:
    """Names of the arguments with which a kernel of these features is called for a problem."""
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    operands = Operands(*(np.zeros(shape, np.float16) for shape in shapes))  # as no value matters
    if problem.sinks:
        operands = replace(operands, sinks=np.zeros(problem.nheads, np.float32))
    if problem.term is not None:
        operands = replace(operands, term=np.zeros(problem.term_shape, format_of(problem)))
    if problem.cache is not None and problem.cache.fp8:
        by_row = problem.cache.fp8 == "row"
        ones = np.ones((problem.batch, problem.nheads_kv, problem.seqlen_k if by_row else 1), np.float32)
        descale = Descale(ones, int(by_row))
        operands = replace(operands, k_descale=descale, v_descale=descale)
    asked = kernel(features)
    assert asked.refusal(problem) is None
    with pytest.raises(Called) as call:
        asked.code.run(problem, operands, asked.code.configure(problem))
    return set(call.value.args)


def problems() -> set[AttentionProblem]:
    """Problems of every class of serving, each with lengths that may be none, in pages and in rows of every kind."""
    own = {d.name: d.classes for d in DIMENSIONS if d.features}
    single = [{name: c} for name, classes in own.items() for c in classes if name != "behind"]
    sizes = [{}, {"keys": "none"}, {"layout": "packed", "batch": "2"}, {"batch": "3 or more", "queries": "one"}]
    found = set()
    plain = (FEATURES | SERVING) - {"seqused_k", "paged", "block_descale", "mods", *KINDS}
    for more in ({"seqused_k"}, {"paged"}, {"seqused_k", "paged"}, set(KINDS)):  # caches take no terms of scores
        asked = kernel(plain | more)
        for seed, one, size in product(range(2), single, sizes):
            with contextlib.suppress(ValueError):
                found.add(space.case_of(asked, one | size, seed).problem)
    return found


def test_no_argument_is_handed_over_that_no_declared_feature_has():
    met = set()
    for problem in problems():
        needs = needed_features(problem)
        met.add(needs & (SERVING | {"varlen"}))
        by_cache = ({"paged"}, {"seqused_k"}, {"paged", "seqused_k"})  # in which it goes through its cache
        for caches in ((), *(() if problem.term else by_cache)):
            features = needs.union(caches)
            allowed = {"softmax_scale"}.union(*(WITH.get(feature, ()) for feature in features))
            surplus = handed(features, problem) - allowed
            assert not surplus, (sorted(features), problem, surplus)
    # Functions that a kernel has built in are no argument.
    assert frozenset().union(*met) == SERVING - {"mods"} | {"varlen"}
    assert len(met) >= 20
