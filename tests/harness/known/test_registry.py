"""Which kernels are this package's own: those of its table, whatever others call theirs."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.campaign import introduction
from fa3verify.campaign.plan import plan
from fa3verify.kernels.twins import BUILT_IN, ON_REQUEST, is_twin
from fa3verify.known import registry


def test_every_twin_is_known_by_name_and_by_what_may_stand_behind_it():
    for name in (kernel.name for kernel in (*BUILT_IN, *ON_REQUEST)):
        for behind in ("", "+fault", "@64,128", "[num_splits=0]"):
            assert is_twin(name + behind)


@pytest.mark.parametrize("name", ["twin.mine", "twin.fp16x", "mine:twin.fp16", "twin.", "gluon.fp16"])
def test_a_kernel_that_is_called_like_a_twin_is_a_strangers(name):
    assert not is_twin(name)


def test_what_a_strangers_kernel_returned_is_kept_in_no_journal():
    ours = introduction.introduce("twin.fp16", "quick")
    for name, durable in (("twin.fp16", True), ("twin.mine", False)):
        assert {task.durable for task in plan([replace(ours, name=name)], "quick", 0)} == {durable}


def test_an_installed_kernel_takes_no_name_that_is_built_in(monkeypatch):
    """``find`` takes the twin; the list of kernels must not show another one under its name."""
    entries = [
        importlib.metadata.EntryPoint(name, "nowhere:kernel", registry.ENTRY_POINTS) for name in ("twin.fp16", "x")
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: entries)
    known = registry.discover()
    assert known["twin.fp16"] is registry.find("twin.fp16")
    assert "nowhere" in (known["x"].unavailable or "")


@pytest.mark.parametrize("name", ["flash3.bf16", "vllm.bf16", "sglang.bf16", "gluon.bf16"])
def test_parts_that_a_launch_chooses_are_those_of_its_twin_and_within_a_callers_reach(name):
    problem = AttentionProblem.varlen((1, 1), (2000, 3000), nheads=32, nheads_kv=8, head_dim=128, dtype="bf16")
    kernel = registry.find(f"{name}[num_splits=0]")
    config = kernel.config_for(problem)
    assert config.num_splits == kernel.twin.config_for(problem).num_splits > 1
    assert kernel.unreachable(problem, config) is None
    assert registry.find(name).unreachable(problem, config) is None
