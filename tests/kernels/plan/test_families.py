"""Kernel families, a file each: what is known of each, and that nothing is made up where a family is not known."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import fa3_kernels.plan
from fa3_kernels.plan import families
from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.families import FAMILIES, OURS, traits_of
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.problem import AttentionProblem, Dtype, Operands


def problem(dtype: Dtype = "fp16", head_dim: int = 128, causal: bool = False) -> AttentionProblem:
    return AttentionProblem(1, 2, 2, 8192, 8192, head_dim, dtype=dtype, causal=causal)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_size_a_family_knows_is_a_configuration_it_ships(name):
    traits = traits_of(name)
    for is_fp8, head_dim in traits.sizes:
        dtype: Dtype = "e4m3" if is_fp8 else "bf16"
        assert dtype in traits.dtypes
        for causal in (False, True):
            asked = problem(dtype, min(head_dim, 512), causal)
            if head_dim > 512:  # Q and K whose last channels are V
                asked = replace(asked, head_dim=head_dim, qv=True)
            config = default_config(asked, family=name)
            assert (config.family, config.head_dim) == (name, head_dim)
            assert traits.takes_keys(config.tile_n)
            if traits.registers:
                producer, consumer = config.registers
                assert 128 * (producer + config.consumers * consumer) <= 65536


@pytest.mark.parametrize(
    ("family", "dtype", "head_dim", "causal", "tile"),
    [
        (OURS, "fp16", 64, True, (128, 128)),  # 128 tiles on 132 CTAs, of 192 rows 86: see test_tile_times
        (OURS, "e4m3", 80, False, (128, 128)),  # padded to 128
        ("flash3", "fp16", 128, False, (128, 176)),  # upstream hopper/tile_size.h
        ("flash3", "fp16", 128, True, (128, 128)),
        ("flash3", "e4m3", 128, True, (128, 224)),
        ("flash3", "bf16", 96, False, (192, 144)),
        ("flash3", "e4m3", 192, True, (128, 160)),
        ("flash3.dew", "bf16", 96, False, (128, 176)),  # a build without head_dim 96
        ("cudnn", "bf16", 96, False, (64, 128)),  # the kernel's name says so
        ("flash2", "fp16", 256, False, (64, 64)),  # csrc/flash_attn flash_fwd_launch_template.h
        ("flash4", "bf16", 256, False, (128, 80)),  # flash_attn/cute/interface.py
    ],
)
def test_tiles_are_those_of_the_sources(family, dtype, head_dim, causal, tile):
    config = default_config(problem(dtype, head_dim, causal), family=family)
    assert (config.tile_m, config.tile_n) == tile


@pytest.mark.parametrize(
    ("family", "dtype", "head_dim"), [("flash4", "fp16", 96), ("flash4", "e4m3", 128), ("cudnn", "e4m3", 64)]
)
def test_a_size_that_was_never_read_has_no_tile(family, dtype, head_dim):
    with pytest.raises(ValueError, match=f"{family} has no known tile for {dtype} at head_dim {head_dim}"):
        default_config(problem(dtype, head_dim), family=family)


def test_flash4_takes_no_fp8_and_nobody_else_runs_in_lock_step():
    with pytest.raises(ValueError, match="dtype must be one of fp16, bf16, got 'e4m3'"):
        Config("e4m3", family="flash4")
    with pytest.raises(ValueError, match="without warp specialisation there is one schedule"):
        Config(pingpong=False, warp_specialized=False, family="flash3")


def test_a_chosen_register_split_replaces_the_familys():
    assert Config("e4m3").registers == (40, 232)
    assert Config("e4m3", producer_regs=24, consumer_regs=240).registers == (24, 240)


def test_each_family_has_the_bound_of_its_own_order():
    small = AttentionProblem(1, 1, 1, 4, 300, 64)
    rng = np.random.default_rng(0)
    x = Operands(
        *(4 * rng.standard_normal(s).astype(np.float16) for s in (small.q_shape, small.k_shape, small.v_shape))
    )
    ours, other = (default_config(small, family=family) for family in ("gluon", "flash3"))
    bounds = [forward_bound(small, x, config.kernel_model()) for config in (ours, other)]
    assert (bounds[1].lse > bounds[0].lse).all()  # unscaled maxima are scaled for the lse once more
    assert (bounds[1].out >= 0).all()


def test_a_plan_is_made_without_numba():
    """Who launches a kernel does not wait for a compiler of CPU loops, whatever a family tells its bound."""
    program = "import sys, fa3_kernels.plan.plan, fa3verify.kernels; print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("family", "changes", "rule"),
    [
        ("flash3.dew", {"softcap": 20.0}, "no launch of this build with softcap"),
        ("flash3", {"head_dim_v": 64}, "no kernel has head_dim 128 with head_dim_v 64"),
        ("flash2", {"window": (9, 9)}, "it takes no window"),
        ("cudnn", {"seqlen_q": 1}, "one query runs another kernel"),
        ("triton_unscaled", {"seqlen_k": 100}, "multiples of 64"),
        ("flash4", {}, "no bits of this family are known"),
    ],
)
def test_a_problem_whose_bits_are_not_known_is_refused_with_the_rule(family, changes, rule):
    with pytest.raises(ValueError, match=rule):
        traits_of(family).check_reproduced(replace(problem(), **changes))


def test_a_schedule_that_nobody_knows_is_not_made_up():
    with pytest.raises(ValueError, match="the schedule of cudnn is not known"):
        _ = Config(family="cudnn", tile_m=64).registers


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_are_split_only_where_the_family_has_a_kernel_for_it(name):
    """Parts would be merged in an order that no kernel has."""
    config = default_config(problem("bf16", 128 if name != "triton_unscaled" else 64), family=name, num_splits=1)
    if name in ("cudnn", "triton_unscaled"):
        with pytest.raises(ValueError, match="does not split keys, got num_splits 2"):
            replace(config, num_splits=2)
    else:
        assert replace(config, num_splits=2).num_splits == 2


def test_a_file_that_is_added_is_a_family(tmp_path, monkeypatch):
    text = "from fa3_kernels.plan.families.cudnn import FAMILIES as OLD\nFAMILIES = {'mine': OLD['cudnn']}\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{families.__name__}.mine", raising=False)
    assert families._found()["mine"] is FAMILIES["cudnn"]
    assert next(iter(families._found())) == OURS


def test_no_module_of_the_plan_is_in_a_circle():
    """Imports for types count, and the table imports every file of its folder though no line says so."""
    root = Path(fa3_kernels.plan.__path__[0])
    places: dict[str, Path] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parents[1]).with_suffix("").parts
        places[".".join(parts).removesuffix(".__init__")] = path
    known: dict[str, set[str]] = {}
    for name, path in places.items():
        imported = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom) and x.module]
        named = {f"{x.module}.{alias.name}" for x in imported for alias in x.names} | {str(x.module) for x in imported}
        known[name] = (named & places.keys()) - {name, fa3_kernels.plan.__name__}
    known[families.__name__] |= {name for name in places if name.startswith(f"{families.__name__}.")}
    assert len(known) > 20
    assert [*TopologicalSorter(known).static_order()]  # CycleError names the circle
