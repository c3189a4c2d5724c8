"""Names of kernels: what stands in one is read in one place, and written as it was read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.gate import Baseline
from fa3verify.judging.judgement import judge
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.names import KernelName
from fa3verify.known import registry
from fa3verify.report.svg import colour

PARTS = {
    "twin.fp16": {"base": "twin.fp16"},
    "twin.fp16+stale_v@64,128[tile_n=64,pack_gqa=true,out_dtype=fp16]": {
        "base": "twin.fp16",
        "fault": "stale_v",
        "head_dims": (64, 128),
        "changes": {"tile_n": 64, "pack_gqa": True, "out_dtype": "fp16"},
    },
    "gluon.bf16@64[order=out/order-1.json]": {"base": "gluon.bf16", "head_dims": (64,), "order": "out/order-1.json"},
    "twin.bf16[num_splits=-1]": {"base": "twin.bf16", "changes": {"num_splits": -1}},
    "mine:kernel.bf16@64": {"base": "mine:kernel.bf16", "head_dims": (64,)},
    # Signs in front of the colon are those of somebody's own path.
    "/home/a+b/x@y/k[1].py:f@64": {"base": "/home/a+b/x@y/k[1].py:f", "head_dims": (64,)},
    "twin.bf16[family=/home/o[1]/x.json]": {"base": "twin.bf16", "changes": {"family": "/home/o[1]/x.json"}},
}


@pytest.mark.parametrize("text", PARTS)
def test_a_name_has_its_parts_and_is_written_as_it_was_read(text):
    name = KernelName.parse(text)
    assert name == KernelName(**PARTS[text])
    assert str(name) == text


def test_head_dims_and_changes_stand_in_any_order():
    assert KernelName.parse("twin.fp16[tile_n=64]@64") == KernelName.parse("twin.fp16@64[tile_n=64]")
    kernel = registry.find("twin.fp16[tile_n=64]@64")
    assert kernel.name == "twin.fp16[tile_n=64]@64"
    assert (kernel.head_dims, kernel.config_for(AttentionProblem(1, 1, 1, 8, 8, 64)).tile_n) == ((64,), 64)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("twin.fp16@64@64", "head dims stand once"),
        ("twin.fp16[tile_n=64]@64[tile_n=64]", "and so do changes"),
        ("twin.fp16@", "numbers such as 64,128, got ''"),
        ("mine:kernel@64x", "numbers such as 64,128, got '64x'"),
        ("twin.fp16[tile_n]", r"KERNEL\[FIELD=VALUE,...\]"),
        ("twin.fp16[tile_n=64,]", r"KERNEL\[FIELD=VALUE,...\]"),
        ("twin.fp16[order=x.json,tile_n=64]", "an order stands alone"),
    ],
)
def test_a_name_that_says_something_twice_or_nothing_is_refused(text, rule):
    with pytest.raises(ValueError, match=rule):
        KernelName.parse(text)


@pytest.mark.parametrize("name", ["twin.fp16[]", "twin.fp16+"])
def test_what_is_no_part_of_a_name_is_answered_by_the_name_that_was_meant(name):
    with pytest.raises(ValueError, match=r"did you mean twin\.fp16\?"):
        registry.find(name)


def test_a_fault_stands_in_a_kernels_configuration_and_in_its_colour():
    kernel = registry.find("twin.fp16+truncated_output[tile_n=64]")
    assert kernel.fault is not None
    assert kernel.code.changes == (("tile_n", 64),)
    assert (
        colour("twin.fp16+stale_v") == colour("twin.e4m3+stale_v@64") != colour("twin.fp16") == colour("twin.fp16@64")
    )


def test_a_planted_mistake_is_compared_with_the_twin_of_the_same_head_dims():
    """Figures of all head dims are no baseline of those of one."""
    baseline = Baseline("quick", 0, {"twin.fp16": {"normal": {"ratio_max": 0.5}}})
    assert baseline.figures("twin.fp16+stale_v", "normal") == baseline.figures("twin.fp16", "normal") is not None
    for name in ("twin.fp16@64", "twin.fp16+stale_v@64", "twin.fp16[tile_n=64]", "twin.fp16+stale_v[tile_n=64]"):
        assert baseline.figures(name, "normal") is None


CASE = Case("mine", AttentionProblem(1, 1, 1, 40, 300, 64, dtype="bf16", causal=True), Recipe("normal", seed=3))
RELEASED = registry.find("twin.flash3.bf16")


def held(side):
    """Return a function of arrays that promises the bits of FlashAttention-3 and has those of ``side``."""

    def function(q, k, v, *, softmax_scale, causal):
        operands = CASE.operands()
        return tuple(side.code.run(CASE.problem, operands, side.config_for(CASE.problem)))

    (kernel,) = array_kernel(function, name="mine", dtypes=("bf16",), layout="bshd", twin=RELEASED)
    return kernel


def test_a_function_is_held_against_its_twin_in_the_configuration_of_the_twins_family():
    """A function says nothing of its configuration: ours stood in, so that right bits were wrong and ours right."""
    assert judge(held(RELEASED), CASE).measures["bits_differing"] == 0
    assert judge(held(registry.find("twin.bf16")), CASE).measures["bits_differing"] > 0


def test_a_twin_is_a_kernel_and_no_name():
    with pytest.raises(ValueError, match=r"twin must be a kernel, as find_kernel returns it, got 'twin\.fp16'"):
        replace(registry.find("twin.fp16"), twin="twin.fp16")


def test_changes_are_those_of_a_kernels_twin_as_well():
    kernel = registry.find("gluon.fp16[num_splits=3]")
    assert kernel.twin.code.changes == (("num_splits", 3),)
    assert kernel.twin.name == "twin.fp16[num_splits=3]"
    assert registry.find("gluon.fp16").twin is registry.find("twin.fp16")
