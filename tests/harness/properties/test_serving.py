"""Laws of calls that serve: right functions keep every one, and each is broken by a mistake that it is about."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.properties.runner import run_law
from fa3verify.properties.serving import SERVING_LAWS
from tests.harness.kernels import serving_kernels as kernels

BOTH = ("causal", "gqa", "varlen", "seqused_k", "paged", "append", "sinks", "fp8_cache", "fp8_rows")
PLAIN = ("causal", "gqa", "sinks", "attention_chunk")
LAWS = {law.name: law for law in SERVING_LAWS}
OF_PLAIN = {"a_sink_is_a_key_without_value", "one_chunk_is_none"}
# A sink's key is in P V, in another place; numpy sums products of other shapes in another order.
OF_OTHER_SUMS = {"a_sink_is_a_key_without_value", "prefill_equals_chunks_that_append"}
EXAMPLES = 12


def _kernel(function, features, **facts) -> Kernel:
    given = {"dtypes": ("fp16",), "layout": "bshd", "head_dims": (64,), "bitwise": tuple(LAWS)} | facts
    bitwise = [name for name in given["bitwise"] if LAWS[name].kind == "agreement"]
    return array_kernel(function, features=features, **given | {"bitwise": bitwise})[0]


def _status(name: str, kernel: Kernel) -> str:
    return run_law(LAWS[name], kernel, max_examples=EXAMPLES, seed=0, shrink_seconds=0).status


@pytest.mark.parametrize("name", LAWS)
def test_right_functions_keep_the_laws_of_serving(name):
    exact = () if name in OF_OTHER_SUMS else (name,)
    function, features = (kernels.plain, PLAIN) if name in OF_PLAIN else (kernels.cached, BOTH)
    assert _status(name, _kernel(function, features, bitwise=exact)) == "pass"


def _leaking(q, k_cache, v_cache, **given):
    """Adds 0 times the key behind, as a masked tile does whose V was not cleared."""
    out, lse = kernels.cached(q, k_cache, v_cache, **given)
    return out + 0 * k_cache.astype(np.float32).sum().astype(out.dtype), lse


def _leaking_in_rows(q, k_cache, v_cache, **given):
    """Fills what lies behind the keys of a page with zeros, and what lies behind those of a row with nothing."""
    return (kernels.cached if "page_table" in given else _leaking)(q, k_cache, v_cache, **given)


def _by_place(q, k_cache, v_cache, **given):
    """Rounds by where a page lies."""
    out, lse = kernels.cached(q, k_cache, v_cache, **given)
    return out, lse + np.float32(1e-6) * int(np.ravel(given["page_table"])[0]) if "page_table" in given else lse


def _writing(q, k_cache, v_cache, **given):
    """Takes a page that is named twice for an empty one."""
    if "page_table" in given:
        pages, counts = np.unique(given["page_table"], return_counts=True)
        v_cache = v_cache.copy()
        v_cache[pages[counts > 1]] = 0
    return kernels.cached(q, k_cache, v_cache, **given)


def _short(*arrays, attention_chunk=0, **given):
    """Takes chunks to hold one key less."""
    return kernels.plain(*arrays, attention_chunk=attention_chunk - (attention_chunk > 1), **given)


def _with_value(*arrays, sinks=None, **given):
    """Takes a sink in base 2."""
    return kernels.plain(*arrays, sinks=None if sinks is None else sinks * np.float32(np.log(2)), **given)


def _sunk(q, k_cache, v_cache, sinks=None, **given):
    """Takes -inf for a sink of 0."""
    return kernels.cached(q, k_cache, v_cache, sinks=None if sinks is None else np.nan_to_num(sinks, neginf=0), **given)


def _unmasked(q, k_cache, v_cache, causal=False, **given):
    """Hides the keys that a call appends from no query of it, but in the first chunk."""
    is_first = "k_new" not in given or not given["cache_seqlens"].any()
    return kernels.cached(q, k_cache, v_cache, causal=causal and is_first, **given)


MISTAKES = {
    "what_lies_behind_never_matters": (_leaking, BOTH),
    "pages_lie_anywhere": (_by_place, BOTH),
    "shared_pages_equal_copies": (_writing, BOTH),
    "pages_of_any_size": (functools.partial(kernels.cached, mistake="stale page"), BOTH),
    "pages_equal_rows": (functools.partial(kernels.cached, mistake="stale page"), BOTH),
    "appended_keys_equal_stored_ones": (functools.partial(kernels.cached, mistake="append"), BOTH),
    "prefill_equals_chunks_that_append": (_unmasked, BOTH),
    "fp8_keys_equal_dequantised_ones": (functools.partial(kernels.cached, mistake="descale"), BOTH),
    "a_sink_of_minus_infinity_is_none": (_sunk, BOTH),
    "a_sink_is_a_key_without_value": (_with_value, PLAIN),
    "one_chunk_is_none": (_short, PLAIN),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_mistake_of_serving_breaks_its_law_without_bits(name):
    function, features = MISTAKES[name]
    assert _status(name, _kernel(function, features, name="wrong", bitwise=())) == "fail"


def test_what_lies_behind_is_asked_in_rows_of_a_kernel_that_takes_pages_as_well():
    wrong = _kernel(_leaking_in_rows, BOTH, name="wrong", bitwise=())
    assert _status("what_lies_behind_never_matters", wrong) == "fail"


def test_a_sink_and_its_key_are_one_number():
    """With a scale of 1 / sqrt(128) a sink was rounded to binary32, and a right kernel off by 1.00002 bounds."""
    twin = find("twin.bf16")
    kernel = replace(twin, features=twin.features | {"sinks"})
    found = run_law(LAWS["a_sink_is_a_key_without_value"], kernel, max_examples=12, seed=1, shrink_seconds=0)
    assert found.status == "pass", found.violation


def test_laws_of_serving_are_not_asked_of_kernels_that_do_not_serve():
    plain = _kernel(kernels.plain, ("causal", "gqa"))
    assert not [law.name for law in SERVING_LAWS if law.applies(plain)]
