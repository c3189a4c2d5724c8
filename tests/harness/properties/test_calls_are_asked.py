"""What the laws about calls find, which kernels they leave alone, and what they say was asked."""

from __future__ import annotations

import numpy as np
import pytest

from fa3verify.campaign.introduction import found
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.twins import twin
from fa3verify.properties import find_law, run_law
from fa3verify.properties.ladder import LADDERS, problem_of

pytest.importorskip("torch", reason="needs torch: pip install torch")

from tests.quality.calls.museum import EXHIBITS
from tests.quality.outside.plain import attend

pytestmark = pytest.mark.optional
INDICES, VIEWS, UNREAD, REUSE = (
    "every_index_is_read_where_it_lies",
    "views_are_read_by_their_strides",
    "nothing_else_is_read",
    "calls_leave_no_trace",
)
FOUND_BY = (
    ("batch_of_64", INDICES),
    ("group_of_12", INDICES),
    ("twentieth_sequence", INDICES),
    ("sinks_from_head_32", INDICES),
    ("descales_of_heads", INDICES),
    ("dk_of_last_head", INDICES),
    ("channel_stride", VIEWS),
    ("v_like_k", VIEWS),
    ("heads_far_apart", VIEWS),
    ("packed_qkv", VIEWS),
    ("table_slices", VIEWS),
    ("dout_of_split", VIEWS),
    ("largest_not_reached", UNREAD),
    ("minus_one_ends", UNREAD),
    ("one_output", REUSE),
    ("output_of_v", REUSE),
    ("kept_lengths", REUSE),
    ("after_exception", REUSE),
    ("shared_scratch", REUSE),
    ("reseeds_numpy", REUSE),
    ("leaves_environment", REUSE),
    ("leaves_errors", REUSE),
    ("added_to_before", REUSE),
)
OF_TORCH = (("storage_offset", VIEWS), ("grad_mode", REUSE), ("second_backward", REUSE))
RIGHT = ("needs_channels", "padded_output", "int8_inside", "no_lse", "kept_plans", "few_sequences", "self_attention")


def _found(exhibit: str, law: str, examples: int = 4):
    kernel = found(EXHIBITS[exhibit].reference)
    return run_law(find_law(law), kernel, max_examples=examples, seed=0, shrink_seconds=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("exhibit", "law"), FOUND_BY)
def test_a_wrong_call_is_found_by_the_law_that_is_for_it(exhibit, law):
    outcome = _found(exhibit, law)
    assert outcome.violation is not None, f"{outcome.examples} trials"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("exhibit", "law"), OF_TORCH)
def test_a_wrong_call_of_torch_is_found(exhibit, law):
    assert _found(exhibit, law).violation is not None


@pytest.mark.usefixtures("short_walks")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("law", [INDICES, VIEWS, UNREAD, REUSE])
@pytest.mark.parametrize("exhibit", RIGHT)
def test_a_right_kernel_with_a_style_of_its_own_passes(exhibit, law):
    outcome = _found(exhibit, law, 1)
    assert outcome.violation is None, outcome.message
    assert outcome.examples


def _from(n: int, size: str, q, k, v, **given):
    """Leave out what a size has from its n-th place on."""
    out, lse = attend(q, k, v, **given)
    axis = {"batch": 0, "queries": 1, "heads": 2}[size]
    out[(slice(None),) * axis + (slice(n, None),)] = 0
    return out, lse


@pytest.mark.parametrize(("size", "n"), [("batch", 37), ("queries", 1000), ("heads", 90)])
def test_the_smallest_size_that_fails_is_named(size, n):
    (kernel,) = array_kernel(lambda *a, **o: _from(n, size, *a, **o), name="k", layout="bshd")
    outcome = run_law(find_law(INDICES), kernel, max_examples=2, seed=0)
    assert outcome.message is not None
    assert outcome.message.startswith((f"{size} {n + 1:,}:", f"kv heads {n // 2 + 1:,}:")), outcome.message


def test_a_kernel_is_not_asked_for_sizes_that_it_declares_not_to_take_or_refuses():
    def refuses(q, k, v, **given):
        if q.shape[0] > 40:
            raise ValueError("at most 40 sequences")
        return attend(q, k, v, **given)

    kernels = [
        *array_kernel(refuses, name="refuses", layout="bshd"),
        *array_kernel(attend, name="declares", layout="bshd", max_batch=40, head_dims=(64,)),
    ]
    for kernel in kernels:
        outcome = run_law(find_law(INDICES), kernel, max_examples=1, seed=0)
        assert outcome.status == "pass", outcome.message
        asked = dict(outcome.tried.asked)
        assert "4,096" not in asked["batch"].replace(" ", "")
        assert "group" in asked
    assert problem_of(kernels[1], LADDERS["batch"], 4096) is None


def test_what_was_asked_is_said():
    (kernel,) = array_kernel(attend, name="k", layout="bshd", features=("causal", "gqa", "varlen"))
    said = {}
    for law in (VIEWS, UNREAD, REUSE):
        tried = run_law(find_law(law), kernel, max_examples=1, seed=0).tried
        said |= dict(tried.asked) | {f"{name} as a view": view for name, view in tried.layouts}
    assert {"not to be read", "calls", "k as a view", "all arguments as a view"} <= said.keys()
    assert "fresh memory" in said["not to be read"]


def test_a_twin_which_is_handed_no_tensors_is_asked_for_sizes_and_reuse_alone():
    assert [law for law in (INDICES, VIEWS, UNREAD, REUSE) if find_law(law).applies(twin("fp16"))] == [INDICES, REUSE]


def test_memory_that_nobody_wrote_is_not_a_number():
    def adds(q, k, v, **given):
        """Adds to what it takes for zeros."""
        out, lse = attend(q, k, v, **given)
        held = np.empty(out.shape, np.float32)
        held[...] = np.where(np.isfinite(held) & (np.abs(held) < 1e30), 0, held) + out
        return held.astype(out.dtype), lse

    (kernel,) = array_kernel(adds, name="k", layout="bshd")
    with np.errstate(all="ignore"):
        outcome = run_law(find_law(UNREAD), kernel, max_examples=1, seed=0, shrink_seconds=0)
    assert outcome.message is not None
    assert outcome.message.startswith("fresh memory: ")
