"""What is learned of a kernel that states no order is said in the words that declare it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fa3verify
from fa3verify.learn.launcher import Launcher
from fa3verify.learn.probes import Probes
from fa3verify.learn.space import Structure


def attention(q, k, v, softmax_scale, *, query, scores):
    scale = np.float32(softmax_scale)
    if query is not None:
        q, scale = (q * scale).astype(query), np.float32(1)
    s = (q.astype(np.float32) @ k.swapaxes(-1, -2).astype(np.float32)).astype(scores).astype(np.float32)
    s = (s * scale).astype(scores).astype(np.float32)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return (p @ v.astype(np.float32) / total).astype(np.float16), (np.log(total) + top)[..., 0]


@pytest.mark.parametrize(
    ("query", "scores", "known"),
    [
        (None, np.float32, Structure()),
        (np.float16, np.float32, Structure(folding="folded")),
        (None, np.float16, Structure(scores="fp16")),
    ],
)
def test_a_scale_in_q_is_told_from_scores_in_16_bits(query, scores, known):
    def function(q, k, v, *, softmax_scale):
        return attention(q, k, v, softmax_scale, query=query, scores=scores)

    (kernel,) = fa3verify.array_kernel(function, features=(), head_dims=(64,))
    assert Probes(Launcher(kernel, 64)).folding(Structure()) == known


@pytest.mark.parametrize(
    "changed", [{"folding": "folded"}, {"scores": "fp16"}, {"value_bits": 11}, {"scores": "fp16", "value_bits": 11}]
)
def test_what_is_said_to_declare_is_a_model(changed):
    any_order = fa3verify.KernelModel.any_order("fp16", "fp16")
    said = Structure(**changed).declaration
    model = eval(said.removeprefix("order="), {"replace": replace, "any_order": any_order})(None)
    assert isinstance(model, fa3verify.KernelModel)
    assert model != any_order


@pytest.mark.parametrize("bits", [0, 8, 13, 24])
def test_nothing_is_said_where_sums_are_in_no_format_of_16_bits(bits):
    assert not Structure(value_bits=bits).declaration
