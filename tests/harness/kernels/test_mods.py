"""Kernels with a score_mod or a mask_mod built in: right ones pass in practice, and a case finds each mistake."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify import Kernel, find_kernel
from fa3verify.cases.case import Case
from fa3verify.cases.practice import practice
from fa3verify.judging.hypotheses import sums_of
from fa3verify.kernels.functions import declared_kernels
from fa3verify.properties import LAWS, find_law, run_law
from fa3verify.properties.trials import WITH_MODS
from tests.harness.kernels.test_terms import worst

pytest.importorskip("torch")
from tests.harness.kernels import mod_kernels as kernels

WALKED = {law.name for law in LAWS if law.walk}  # of how a kernel is called
pytestmark = [pytest.mark.optional, pytest.mark.usefixtures("shared_references")]
MOST_SCORES = 12_000  # of a case here: batch * nheads * seqlen_q * seqlen_k

MISTAKES = (
    ("softcap", None, "before the scale"),
    ("relative", None, "kv_idx off by one in a later tile"),
    ("alibi", None, "kv head"),
    (None, "sliding", "hidden scores are -1000"),
    ("alibi", None, "in bf16"),
    ("softcap", None, "in bf16"),
    ("tempered", None, "batch 0 for all"),
    (None, "document", "batch 0 for all"),
    ("relative", None, "q_idx of the tile"),
    (None, "sliding", "kv_idx of the tile"),
    ("alibi", None, "q_idx from the last key"),
    ("alibi_of_numbers", None, "q_idx and kv_idx exchanged"),
    ("softcap", None, "of the negative score"),
    ("alibi", None, "not in a later tile of keys"),
    ("softcap", None, "twice"),
    ("softcap", "document", "hidden before the score_mod"),
    (None, "blocks", "mask forgotten in the last tile"),
    (None, "window", "mask inverted in a row"),
)
RIGHT = (
    ("alibi", None, {}),
    ("alibi_of_numbers", None, {"in_log2": True}),
    ("softcap", "sliding", {}),
    ("relative", None, {}),
    ("tempered", "document", {"in_log2": True}),
    ("squared", None, {}),
    ("causal_score", None, {}),
    (None, "window", {}),
    ("stepped", None, {}),
)


def kernel_of(score: str | None, mask: str | None, function: Any = None, dtype: str = "fp16", **facts: Any) -> Kernel:
    """A kernel that is told apart from others by what it declares, and not by its name."""
    mods = {"score_mod": score and getattr(kernels, score), "mask_mod": mask and getattr(kernels, mask)}
    steps = {name: facts.pop(name) for name in ("mistake", "in_log2") if name in facts}
    called = function or functools.partial(kernels.attention, **mods, **steps)
    limits = {"max_seqlen_q": 200, "max_seqlen_k": 2048, "max_batch": 8, "max_nheads": 16}
    declared = {
        "library": "torch",
        "dtypes": (dtype,),
        "name": "k",
        "head_dims": (64,),
        "features": ("gqa",),
        **limits,
        **mods,
    } | facts
    return declared_kernels(called, declared)[0]


def cases(kernel: Kernel) -> list[Case]:
    """Return the small cases of practice of a quick campaign."""
    sizes = ("batch", "nheads", "seqlen_q", "seqlen_k")
    found = practice(kernel, "quick", 0)
    return [case for case in found if math.prod(getattr(case.problem, size) for size in sizes) <= MOST_SCORES]


@pytest.mark.parametrize(("turn", "right"), list(enumerate(RIGHT)))
def test_a_right_kernel_keeps_the_bound_in_every_case(turn, right):
    score, mask, steps = right
    kernel = kernel_of(score, mask, dtype=("fp16", "bf16", "fp32")[turn % 3], **steps)
    ratio, words = worst(kernel, cases(kernel))
    assert 0.01 < ratio <= 1, words


@pytest.mark.parametrize(("score", "mask"), [("alibi", None), ("softcap", "document"), ("chained", "sliding")])
def test_flex_attention_is_given_the_functions_and_keeps_the_bound(score, mask):
    kernel = kernel_of(score, mask, kernels.flex, like="flex", dtype="bf16")
    asked = [case for case in cases(kernel) if case.problem.seqlen_k][::3]
    ratio, words = worst(kernel, asked)
    assert 0.1 < ratio <= 1, words


def test_a_function_of_fewer_bits_than_declared_is_wrong_and_right_where_they_are_declared():
    """As tanh.approx, whose relative error is 2^-11."""
    kernel = kernel_of("softcap", None, mistake="of approximate bits", dtype="fp32")
    asked = cases(kernel)[:4]
    assert worst(kernel, asked, most=1)[0] > 1
    declared = kernel_of("softcap", None, mistake="of approximate bits", dtype="fp32", score_mod_ulp=2.0**12)
    assert worst(declared, cases(declared)[:4])[0] <= 1


@pytest.mark.parametrize(("score", "mask", "mistake"), MISTAKES)
def test_a_mistake_is_found_in_practice(score, mask, mistake):
    kernel = kernel_of(score, mask, mistake=mistake)
    assert not worst(kernel, cases(kernel), most=1)[0] <= 1


def status(law: str, kernel: Kernel, max_examples: int = 3) -> str:
    outcome = run_law(find_law(law), kernel, max_examples=max_examples, seed=0, shrink_seconds=0.2)
    assert outcome.violation is None or outcome.status == "fail"
    return outcome.status


def test_the_laws_that_hold_with_functions_exist():
    assert {law.name for law in LAWS} >= WITH_MODS


@pytest.mark.usefixtures("short_walks")
@pytest.mark.parametrize(("score", "mask"), [("alibi", "two_of_three"), ("softcap", "sliding")])
def test_a_right_kernel_obeys_every_law_that_is_asked_of_it(score, mask):
    kernel = replace(kernel_of(score, mask), bitwise=None)  # all bits are claimed
    asked = [law.name for law in LAWS if law.applies(kernel)]
    assert {"keys_that_a_term_hides_never_matter", "neighbours_never_leak"} < set(asked) <= WITH_MODS | WALKED
    assert {law: status(law, kernel, 2) for law in asked} == dict.fromkeys(asked, "pass")


@pytest.mark.parametrize(
    ("law", "mask", "mistake"),
    [
        ("keys_that_a_term_hides_never_matter", "sliding", "hidden scores are -1000"),
        ("rows_that_a_term_empties_are_zero", "two_of_three", "mean in empty rows"),
        ("error_within_bound", "sliding", "q_idx of the tile"),
    ],
)
def test_a_mistake_breaks_its_law(law, mask, mistake):
    assert status(law, kernel_of(None, mask, mistake=mistake), 12) == "fail"


FILE = """
import torch, fa3verify

def cap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)

seen = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx

@fa3verify.kernel(library="torch", features=("gqa",), score_mod=cap, mask_mod=seen, score_mod_ulp=8)
def attention(q, k, v, *, softmax_scale): ...
"""


def test_functions_of_a_file_are_named_by_it_so_that_any_process_finds_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "has_mods.py").write_text(FILE)
    term = find_kernel("has_mods.py:attention").mods
    assert term is not None
    assert (term.score_mod, term.mask_mod, term.score_mod_ulp) == ("has_mods.py:cap", "has_mods.py:seen", 8)


def test_what_is_assumed_of_a_score_mod_is_said_beside_the_sums():
    words = "score_mod .*:softcap off by at most 4 ulp of binary32, monotone within a score's error but for a jump"
    assert re.search(rf"sums in binary32 \(device: CPU; {words}\)$", str(sums_of(kernel_of("softcap", None))))
    assert str(sums_of(kernel_of(None, "sliding"))) == "sums in binary32 (device: CPU)"
    assert kernel_of(None, "sliding").declared[-1] == "mask_mod tests.harness.kernels.mod_kernels:sliding"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"score_mod": lambda s, b, h, i, j: s}, "score_mod must have a name at the top of the kernel's module"),
        ({"mask_mod": kernels.of_window(3)}, "mask_mod must have a name .*, got 'of_window.<locals>.window'"),
        ({"score_mod_ulp": 3.0}, "score_mod_ulp is that of a score_mod, got 3.0 without one"),
        ({"features": ("mods",)}, "feature must be among .*, got 'mods'"),
        ({"score_mod": kernels.alibi, "features": ("varlen",)}, "is that of a forward with none of e4m3, .*, varlen"),
        ({"score_mod": kernels.alibi, "features": ("bias",)}, "is that of a forward with none of e4m3, "),
        ({"score_mod": kernels.alibi, "dtypes": ("e4m3",)}, "is that of a forward with none of e4m3, "),
        ({"score_mod": kernels.alibi, "gradients": "autograd"}, "is that of a forward with none of e4m3, "),
    ],
)
def test_what_cannot_be_judged_is_refused_with_its_rule(facts, message):
    with pytest.raises(ValueError, match=message):
        declared_kernels(kernels.attention, {"library": "torch", **facts})


def test_a_call_without_the_functions_of_its_kernel_is_refused():
    kernel = kernel_of("alibi", None)
    problem = AttentionProblem(1, 1, 1, 4, 4, 64)
    assert kernel.refusal(problem) == "every call must have score_mod tests.harness.kernels.mod_kernels:alibi"
    assert kernel.refusal(kernel.fitted(problem)) is None
    other = kernel_of("softcap", None)
    assert other.refusal(kernel.fitted(problem)) is not None
