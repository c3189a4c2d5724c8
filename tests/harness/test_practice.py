"""What users launch is asked: shapes of public models, every head_dim that a kernel takes, sizes beyond the classes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3verify.cases import probing
from fa3verify.cases.practice import models, practice, probes
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import REFUSED
from fa3verify.known import registry
from fa3verify.operations import FEATURES


def refusing(q, k, v, *, softmax_scale):
    if q.shape[-1] not in (64, 72):
        raise NotImplementedError(f"head_dim {q.shape[-1]}")
    return q


def test_every_model_has_its_source_and_an_attention_layer_that_can_be_posed():
    assert len(models()) >= 30
    assert len({model.name for model in models()}) == len(models())
    for model in models():
        assert model.source.startswith("https://"), model.name
        assert model.problem("fp16", 2, 4096).group == model.nheads // model.nheads_kv


def test_a_quick_campaign_asks_a_dozen_layers_of_4096_keys_and_a_release_all():
    kernel = replace(registry.find("twin.fp16"), features=FEATURES)
    quick, release = (list(practice(kernel, profile, 0)) for profile in ("quick", "release"))
    long = [case for case in quick if case.problem.seqlen_k >= 4096]
    assert len(long) >= 5
    assert max(case.problem.nheads for case in quick) >= 64
    assert max(case.problem.group for case in quick) >= 16
    assert max(case.problem.batch for case in quick) >= 17
    assert len(release) > len(quick)
    assert max(case.problem.seqlen_k for case in release) >= 131_072


@pytest.mark.parametrize(("name", "most"), [("twin.fp16", 2**26), ("twin.e4m3", 2**26), ("twin.backward.bf16", 2**24)])
@pytest.mark.parametrize("profile", ["quick", "release", "soak"])
@pytest.mark.parametrize("is_plain", [False, True])
def test_no_case_of_practice_needs_more_memory_than_a_worker_has(name, most, profile, is_plain):
    """Layers ended release campaigns in a MemoryError: one of 16 heads of 192 channels over 131,072 keys, and, of a
    kernel without grouped heads, where each query head has keys of its own, one of 64 heads of 64 channels."""
    kernel = replace(registry.find(name), head_dims=(64, 128, 192, 256))
    kernel = replace(kernel, features=frozenset()) if is_plain else kernel
    problems = [case.problem for case in practice(kernel, profile, 0)]
    assert max(p.nheads_kv * p.head_dim * p.batch * p.seqlen_k for p in problems) <= most


def test_cases_of_practice_are_those_of_their_seed():
    kernel = registry.find("twin.bf16")
    assert list(practice(kernel, "quick", 3)) == list(practice(kernel, "quick", 3))
    assert list(practice(kernel, "quick", 3)) != list(practice(kernel, "quick", 4))


def test_a_kernel_that_declares_no_head_dims_is_asked_for_each_and_not_judged_at_those_that_it_refuses(monkeypatch):
    monkeypatch.setattr("fa3verify.kernels.record.REFUSED", REFUSED)
    kernel = array_kernel(refusing, features=())[0]
    probing.probe(kernel)
    try:
        assert REFUSED[kernel.name] == frozenset(range(8, 257, 8)) - {64, 72}
        assert {case.problem.head_dim for case in probes(kernel)} == {64, 72}
    finally:
        del REFUSED[kernel.name]


def test_a_quantizer_has_layers_long_rows_many_heads_and_batches_and_seeds_that_no_byte_holds():
    kernel = registry.find("twin.quantize")
    assert not [*probes(kernel)]
    cases = list(practice(kernel, "quick", 0))
    problems = [case.problem for case in cases]
    assert all(kernel.supports(problem) and dict(case.changes)["seed"] > 255 for case, problem in zip(cases, problems))
    assert max(problem.seqlen_k for problem in problems) > 4000
    assert max(problem.seqlen_q for problem in problems) > 2048
    assert max(problem.batch for problem in problems) > 64
    assert max(problem.nheads for problem in problems) > 100
    assert any(problem.is_varlen for problem in problems)
    assert len({case.changes for case in cases}) == len(cases)


def test_every_size_of_practice_is_one_that_tma_takes():
    """What no kernel takes is skipped without a word, so that it would be asked of none."""
    kernel = replace(registry.find("twin.fp16"), features=FEATURES)
    problems = [case.problem for case in practice(kernel, "release", 0)]
    assert {(p.head_dim % 8, p.head_dim_v % 8) for p in problems} == {(0, 0)}
