"""The space of cases: a case has the classes that it was chosen for, and a class is in one place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.known.registry import find
from tests.harness import third_party

KERNELS = ("twin.fp16", "twin.e4m3", "twin.quantize", "twin.backward.fp16", "twin.cudnn.fp16")


@pytest.mark.parametrize("name", KERNELS)
def test_a_case_of_a_class_has_it_and_is_plain_otherwise(name):
    kernel = find(name)
    plain = space.point(kernel, space.case_of(kernel, {}))
    for dimension, classes in space.claimed(kernel).items():
        for chosen in classes:
            point = space.point(kernel, space.case_of(kernel, {dimension: chosen}))
            assert point[dimension] == chosen, dimension
            others = {n for n in plain if point[n] != plain[n]} - {dimension}
            # Packed sequences of which some are empty are several; cuDNN's causal mask wants equal lengths.
            assert others <= {"batch", "keys"}, (dimension, chosen, others)


def test_a_kernel_claims_the_classes_that_it_declares():
    assert {n: len(c) for n, c in space.claimed(find("twin.e4m3")).items()} == {
        n: len(c) for n, c in space.dimensions(find("twin.e4m3")).items()
    }
    narrow = space.claimed(third_party.in_whole_tiles())
    assert narrow["head_dim"] == ("64",)
    assert narrow["mask"] == ("none", "causal")
    assert (narrow["group"], narrow["softcap"], narrow["splits"]) == (("1",), ("off",), ("one",))


@pytest.mark.parametrize(
    ("lengths", "classes"),
    [
        ((1, 0), ("one", "none")),
        ((2, 1), ("part of a tile", "one")),
        ((128, 127), ("a tile", "a tile but one")),
        ((193, 128), ("several tiles", "a tile")),
        ((5, 129), ("part of a tile", "a tile and one")),
        ((5, 192), ("part of a tile", "half a tile last")),
        ((5, 200), ("part of a tile", "several tiles")),
        ((5, 1088), ("part of a tile", "long")),
        ((5, 64), ("part of a tile", "part of a tile")),
    ],
)
def test_lengths_are_classed_relative_to_the_kernels_tile(lengths, classes):
    kernel = find("twin.fp16")  # 128 rows and 128 keys at head_dim 64, as it is launched for one head
    case = Case("twin.fp16", AttentionProblem(1, 1, 1, *lengths, 64), Recipe("normal"))
    point = space.point(kernel, case)
    assert (point["queries"], point["keys"]) == classes


def test_masks_are_told_apart():
    kernel, plain = find("twin.fp16"), AttentionProblem(1, 1, 1, 5, 9, 64)
    found = [
        space.point(kernel, Case("twin.fp16", replace(plain, causal=causal, window=window), Recipe("normal")))["mask"]
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (3, 2)), (False, (0, -1)), (False, (-1, 0)))
    ]
    assert found == ["none", "causal", "window both", "window left", "window right"]
