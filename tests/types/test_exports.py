"""What users may import: each package lists it, imports it when it is first asked for, and has types for it."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fa3verify
from fa3verify import records
from fa3verify.campaign.run import Introduction, KernelRun, Run
from fa3verify.kernels.functions import KernelFacts, array_kernel, torch_kernel
from fa3verify.kernels.sizes import Sizes

PACKAGES = ("fa3verify", "fa3_kernels", "fa3_simulator", "fa3_reference")
LAZY = (*PACKAGES, "fa3_reference.bounds")
HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"


def source_of(package: str) -> Path:
    return Path(str(importlib.import_module(package).__file__))


def imported_for_types(package: str) -> dict[str, str]:
    """Public name to ``module:name``, as type checkers see it: what the stub imports."""
    stub = ast.parse(source_of(package).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{each.module}:{alias.name}" for each in imports for alias in each.names}


def listed_for_types(package: str) -> list[str]:
    """The ``__all__`` of the stub, without which a name that it imports is private."""
    stub = ast.parse(source_of(package).with_suffix(".pyi").read_text(encoding="utf-8"))
    return next(ast.literal_eval(each.value) for each in stub.body if isinstance(each, ast.Assign))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_have_types(package):
    assert (source_of(package).parent / "py.typed").exists()


@pytest.mark.parametrize("package", LAZY)
def test_what_type_checkers_see_is_what_is_imported(package):
    module = importlib.import_module(package)
    seen = imported_for_types(package)
    assert sorted(seen) == sorted(listed_for_types(package)) == module.__all__
    assert set(seen) <= set(dir(module))
    assert len(module.__all__) == len(set(module.__all__))
    for name, home in seen.items():
        if name.startswith("flash_attn") or name == "get_scheduler_metadata":
            continue  # these import torch
        there, _, original = home.partition(":")
        assert getattr(module, name) is getattr(importlib.import_module(there), original), name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'forage'"):
        module.forage  # noqa: B018


def test_importing_the_packages_imports_nothing_of_weight():
    heavy = "[m for m in ('numpy', 'numba', 'hypothesis', 'torch') if m in sys.modules]"
    code = f"import sys, {', '.join(PACKAGES)}; [dir(m) for m in ({', '.join(PACKAGES)})]; print({heavy})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("given", ["twin.fp16", len])
def test_kernel_declares_and_says_what_looks_a_kernel_up(given):
    with pytest.raises(ValueError, match=r"takes keywords alone, got .*: a kernel is looked up by find_kernel\(name\)"):
        fa3verify.kernel(given)  # type: ignore[arg-type]
    assert fa3verify.find_kernel("twin.fp16").name == "twin.fp16"


@pytest.mark.parametrize("declare", [array_kernel, torch_kernel, lambda f, **facts: fa3verify.kernel(**facts)(f)])
def test_a_misspelt_fact_is_named_with_those_that_exist(declare):
    def mine(q, k, v, *, softmax_scale): ...

    with pytest.raises(ValueError, match=r"^feature is no fact of a kernel; known are accumulator, .*, features"):
        declare(mine, feature=("causal",))


def test_facts_of_a_kernel_are_fields_of_its_record_and_options_of_its_maker():
    of_code = {"dtype", "code", "operation", "fault", "forward", "unasked", "lacking"}
    fields = set(fa3verify.Kernel.__dataclass_fields__) - of_code
    options = {"dtypes", "layout", "out_dtype", "library", "gradients", "merge"}
    options |= {"lse_base", "lse_layout", "groups", "packed", "cache_layout"}
    sizes = set(Sizes.__dataclass_fields__) - {"head_dims_v"}
    rest = {"launchable", "identity", "like", "score_mod", "mask_mod", "score_mod_ulp"}
    assert set(KernelFacts.__annotations__) == fields - {"sizes", "mods"} | sizes | options | rest


def test_the_records_of_a_run_have_the_documented_keys():
    documented = re.findall(r"^\| `([^`]+)` \|", (DOCS / "summary.md").read_text(encoding="utf-8"), re.MULTILINE)
    of_kernels = {key.removeprefix("kernels[].") for key in documented if "[]" in key}
    assert set(Run.__dataclass_fields__) == {key for key in documented if "[]" not in key}
    of_atlases, of_unstated_orders = {"loss"}, {"assumed"}
    written = records.plain(KernelRun(introduction=Introduction("mine"), verdict="pass", loss=()))
    assert set(written) == of_kernels - of_unstated_orders | of_atlases


def test_the_users_script_that_type_checkers_read_runs():
    runpy.run_path(str(HERE / "user_script.py"), run_name="__main__")
