"""Kernels are assembled by Triton's own ptxas, whichever one the process has been told to take."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton.experimental.gluon", reason="needs triton: pip install triton==3.6.0")

from triton import knobs

from fa3_kernels.gluon import quantize
from fa3_kernels.gluon.assembler import assembled_by_own_ptxas, own_ptxas
from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.calls import ShippedLaunch, calls_of
from fa3_reports.audit.compile import build_call

pytestmark = pytest.mark.optional


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ptxas that answers for its version and assembles nothing, set as Inductor sets torch's."""
    path = tmp_path / "ptxas"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0" || exit 1\n')
    path.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
    assert knobs.nvidia.ptxas.path == str(path)
    return path


def test_a_launch_is_assembled_by_tritons_own_ptxas(another: Path, tmp_path: Path) -> None:
    launch = ShippedLaunch("x", AttentionProblem(1, 2, 2, 1, 300, 64), {"num_splits": 2})
    call = next(x for x in calls_of(launch) if x.kernel == "combine")
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "cache")  # nothing is found there, so that it must be assembled
        assert build_call(call).kernel


def test_what_the_process_chose_is_its_choice_again(another: Path) -> None:
    with own_ptxas():
        assert knobs.nvidia.ptxas.path != str(another)
    assert knobs.nvidia.ptxas.path == os.environ["TRITON_PTXAS_PATH"] == str(another)


def test_a_choice_stands_where_triton_ships_no_ptxas(another: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vars(type(knobs.nvidia))["ptxas"], "default_path", "/nowhere/ptxas")
    with own_ptxas():
        assert knobs.nvidia.ptxas.path == str(another)


def test_a_kernel_that_is_compiled_when_it_is_launched_is_assembled_so_too(another: Path) -> None:
    kernel = assembled_by_own_ptxas(SimpleNamespace(_do_compile=lambda: knobs.nvidia.ptxas.path))
    assert kernel._do_compile() != str(another) == knobs.nvidia.ptxas.path
    assert {type(each)._do_compile is not each._do_compile for each in quantize.KERNELS.values()} == {True}
    wrapped = kernel._do_compile.__code__
    assert all(each._do_compile.__code__ is wrapped for each in quantize.KERNELS.values())
