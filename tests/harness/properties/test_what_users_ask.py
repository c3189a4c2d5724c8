"""Laws about layouts, offsets, calls that follow each other and the mean of errors find what they are for."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock, call

import numpy as np
import pytest

import fa3verify
from fa3verify.known import registry
from fa3verify.operations import WrongOutput
from fa3verify.properties import find_law, run_law
from fa3verify.properties.surroundings import keeping_environment, settings
from tests.quality.outside.plain import attend

pytestmark = pytest.mark.usefixtures("shared_references")
FOUND_BY = (
    ("packed_values", "views_are_read_by_their_strides"),
    ("broadcast_heads", "views_are_read_by_their_strides"),
    ("narrow_offsets", "views_are_read_by_their_strides"),
    ("keeps_a_maximum", "calls_leave_no_trace"),
    ("reads_the_seed", "calls_leave_no_trace"),
    ("plans_by_the_first_call", "calls_leave_no_trace"),
    ("truncated_p", "errors_have_no_bias"),
    ("flushed_half", "a_lone_key_returns_its_value"),
)
RIGHT = ("tiles", "lazy", "copies")
_seen: list[tuple[int, ...]] = []  # shapes of keys that the kernel below was launched with


@fa3verify.kernel(dtypes=("fp16",), library="numpy", layout="bshd", features=("causal", "gqa"))
def compiles_first(q, k, v, **o):
    """It takes half a second for the first call of a shape, and loses a row in one launch of a hundred."""
    if k.shape not in _seen:
        time.sleep(0.5)
    _seen.append(k.shape)
    out, lse = attend(q, k, v, **o)
    if len(_seen) % 100 == 99 and out.size:
        out.reshape(-1, out.shape[-1])[-1] = 0
    return out, lse


def test_a_stream_is_changed_when_what_was_made_on_the_one_before_is_done(monkeypatch):
    """Operands are made on one stream and outputs are read on it, around a call on another."""
    torch = MagicMock()
    monkeypatch.setitem(sys.modules, "torch", torch)
    (change,) = (write for name, _, write, _ in settings() if name == "the current stream")
    torch.reset_mock()
    change("other")
    assert torch.mock_calls == [call.cuda.synchronize(), call.cuda.set_stream("other")]


@pytest.mark.parametrize(("kernel", "law"), FOUND_BY)
def test_a_wrong_kernel_breaks_the_law_that_is_for_it(kernel, law):
    asked = registry.find(f"tests.quality.outside.wrong:{kernel}")
    outcome = run_law(find_law(law), asked, max_examples=12, seed=0, shrink_seconds=0)
    assert outcome.violation is not None, f"{kernel} survives {outcome.examples} trials of {law}"
    assert outcome.violation.failure is None, outcome.violation.message


def test_a_kernel_that_compiles_at_its_first_call_is_called_as_often_as_another():
    name = f"{__name__}:compiles_first"
    outcome = run_law(find_law("calls_leave_no_trace"), registry.find(name), max_examples=2, seed=0, shrink_seconds=0)
    assert outcome.violation is not None, f"{len(_seen)} launches show no lost row"


@pytest.mark.parametrize(
    ("module", "statement", "is_blamed"),
    [
        ("library", "os.environ['LIBRARY_CACHE'] = 'x'", True),
        ("library", "os.putenv('LIBRARY_CACHE', 'x')", True),
        ("torch._inductor.runtime.cache_dir_utils", "os.environ['TORCHINDUCTOR_CACHE_DIR'] = 'x'", False),
    ],
)
def test_a_call_is_blamed_for_a_variable_that_it_leaves_but_not_for_those_of_torchs_compiler(
    module, statement, is_blamed, monkeypatch
):
    for name in ("LIBRARY_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "before")
    call = partial(exec, statement, {"__name__": module, "os": os})
    blamed = pytest.raises(WrongOutput, match="LIBRARY_CACHE set in the environment")
    with blamed if is_blamed else nullcontext():
        keeping_environment(call)


@pytest.mark.usefixtures("short_walks")
@pytest.mark.parametrize("law", sorted({law for _, law in FOUND_BY}))
@pytest.mark.parametrize("kernel", RIGHT)
def test_a_right_kernel_keeps_it(kernel, law):
    asked = registry.find(f"tests.quality.outside.right:{kernel}")
    outcome = run_law(find_law(law), asked, max_examples=2, seed=0, shrink_seconds=0)
    assert outcome.status == "pass", outcome.violation


@pytest.mark.parametrize("law", ["views_are_read_by_their_strides", "nothing_else_is_read"])
def test_a_twin_which_takes_no_strides_is_not_asked_about_them(law):
    assert not find_law(law).applies(registry.find("twin.fp16"))


def _row_sum_in_16_bits(q, k, v, *, softmax_scale, truncates):
    s = q.astype(np.float32) @ k.swapaxes(-1, -2).astype(np.float32) * np.float32(softmax_scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    rounded = total.astype(np.float16).astype(np.float32)
    if truncates:
        rounded = np.where(rounded > total, np.nextafter(rounded.astype(np.float16), np.float16(0)), rounded)
    return (p @ v.astype(np.float32) / rounded).astype(np.float16)


@pytest.mark.parametrize(("truncates", "status"), [(False, "pass"), (True, "fail")])
def test_the_channels_of_a_row_may_share_the_rounding_of_its_sum_but_rows_no_bias(truncates, status):
    function = partial(_row_sum_in_16_bits, truncates=truncates)
    (asked,) = fa3verify.array_kernel(function, name="sums", features=(), head_dims=(64,), min_seqlen=1)
    outcomes = [
        run_law(find_law("errors_have_no_bias"), asked, max_examples=2, seed=seed, shrink_seconds=0)
        for seed in range(6)
    ]
    assert {outcome.status for outcome in outcomes} == {status}
