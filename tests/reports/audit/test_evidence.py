"""GPU evidence belongs to what was launched: it is stale when the GPU gets something else, and by nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fa3_kernels.audit import evidence
from fa3_kernels.audit.evidence import accepted_rows, evidence_sha256, launch_keys
from fa3_kernels.gluon import unsupported
from fa3_kernels.plan.families import FAMILIES, OURS
from fa3_kernels.plan.families.record import Shipped
from fa3_reports.audit import evidence as changes
from fa3_reports.audit.evidence import changed_since
from fa3_reports.audit.launched import launch_sha256, launches_of
from fa3_reports.audit.probes import audited, probes
from fa3_reports.device.keys import SEVERAL
from fa3_reports.stored import read_csv

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "kernels" / "fa3_kernels"
H200 = ROOT / "reports" / "h200"
EVIDENCE = ("forward", "packed", "paged", "quantize", "timeline", "backward")
HOST = {
    "launch": "plan.plan",
    "schedule": "plan.tile_order",
    "quantize": "gluon.quantize",
    "key_tiles": "plan.key_tiles",
    "variant": "plan.variant",
}
needs_triton = pytest.mark.skipif(unsupported() is not None, reason=f"cannot record launches: {unsupported()}")

OF_ROWS = {"microbench_provenance"}  # each row has its own hash: tests/simulator/test_microbench.py
PROVENANCE = sorted(
    path
    for path in (ROOT / "reports").rglob("*_provenance.json")
    if path.stem not in OF_ROWS and path.parent.name != "mutants"  # which are of twins: tests/reports/mutation
)


@pytest.mark.parametrize("path", PROVENANCE, ids=lambda path: "/".join(path.parts[-4:]))
def test_provenance_has_the_hash_of_its_launches_and_no_word_by_hand_of_whether_they_are_todays(path):
    """Whether it is stale is what a page finds out by itself: tests/harness/report/test_keys.py."""
    facts = json.loads(path.read_text())
    assert "stale" not in facts
    assert facts["evidence_of"] in get_args(evidence.Evidence)
    hashes = {run["launches_sha256"] for run in facts.get("runs", ())} or {facts["launches_sha256"]}
    assert facts["launches_sha256"] in (hashes if len(hashes) == 1 else {*hashes, SEVERAL})
    assert all(re.fullmatch("[0-9a-f]{64}", x) for x in hashes)


def accepted() -> dict[str, dict[str, Any]]:
    return {name: row["launch"] for name, row in accepted_rows().items()}


@pytest.mark.optional
@needs_triton
def test_the_launches_of_this_tree_are_the_accepted_ones():
    assert launches_of(probes()) == accepted(), (
        "python -m fa3_reports audit --accept, if meant: what was measured is then stale"
    )


# What a redesign does: (pattern, replacement) in every module.
REDESIGN = (
    (r"\bforward_lockstep\b", "forward_in_step"),
    (r"\bVariant\b", "Features"),
    (r"\bvariant_of\b", "features_of"),
    (r"\btile_positions\b", "positions_of_a_tile"),
    (r"\binteger_max\b", "maxima_of_integers"),
    (r"\btiles_per_block\b", "tiles_that_share"),
    (r"\blse_stride\b", "stride_of_lse"),
    (r"\bfa3_kernels\.plan\.tile_order\b", "fa3_kernels.order"),
    (r"\bfa3_kernels\.plan\.tiles\b", "fa3_kernels.gluon.row_tiles"),
)
MOVED = (
    ("gluon/forward_lockstep.py", "gluon/forward_in_step.py"),
    ("plan/tile_order.py", "order.py"),
    ("plan/tiles.py", "gluon/row_tiles.py"),
)
PRINT = """
import json
from fa3_reports.audit.launched import launches_of as of
from fa3_reports.audit.probes import probes
print(json.dumps(of(probes())))
"""


@pytest.mark.optional
@needs_triton
def test_comments_names_and_places_of_modules_leave_every_hash(tmp_path):
    copy = tmp_path / "fa3_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):
        text = f"# A comment.\n\n{path.read_text()}"
        for pattern, name in REDESIGN:
            text = re.sub(pattern, name, text)
        path.write_text(text)
    for old, new in MOVED:
        (copy / old).rename(copy / new)
    folders = [tmp_path, ROOT / "reference", ROOT / "reports"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    run = [sys.executable, "-c", PRINT]
    found = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert found.returncode == 0, found.stderr
    assert [*json.loads(found.stdout).values()] == [*launches_of(probes()).values()]


def forget() -> None:
    """Empty the caches of the host, which know nothing of a change."""
    for module, cache in (
        ("plan.plan", "plan_of"),
        ("plan.tile_order", "static_schedule"),
        ("plan.backward", "backward_plan"),
        ("plan.key_tiles", "key_tile_schedule"),
    ):
        getattr(import_module(f"fa3_kernels.{module}"), cache).cache_clear()


@pytest.fixture
def modules() -> Iterator[dict[str, Any]]:
    """The modules of the host."""
    forget()
    yield {name: import_module(f"fa3_kernels.{place}") for name, place in HOST.items()}
    forget()


def hashes(monkeypatch, names: set[str]) -> dict[str, str]:
    """Evidence as it is after some probes were recorded anew."""
    rows = accepted_rows()
    for label, launch in launches_of([x for x in probes() if x.name in names]).items():
        rows[label] = rows[label] | {"launch": launch}
    monkeypatch.setattr(evidence, "accepted_rows", lambda: rows)
    return {of: evidence_sha256(of) for of in EVIDENCE}


def _other_constexpr(patch, m):
    variant_of = m["launch"].variant_of
    other = lambda *args, **more: replace(v := variant_of(*args, **more), integer_max=not v.integer_max)  # noqa: E731
    patch.setattr(m["launch"], "variant_of", other)


def _other_tile(patch, m):
    sizes = FAMILIES[OURS].sizes
    patch.setitem(sizes, (False, 128), replace(sizes[False, 128], shipped=Shipped(128, 64), other=Shipped(128, 64)))


def _reversed_key_tiles(patch, m):
    gangs = m["key_tiles"]._gangs
    patch.setattr(m["key_tiles"], "_gangs", lambda *args: iter([*gangs(*args)][::-1]))


def _reversed_order(patch, m):
    order = m["schedule"].handed_out
    patch.setattr(m["schedule"], "handed_out", lambda *args: order(*args)[::-1])


Change = Callable[[pytest.MonkeyPatch, dict[str, Any]], None]
# What a change of the kernels is made of: (how, a probe that has it, evidence that is then stale).
CHANGES: dict[str, tuple[Change, str, set[str]]] = {
    "nothing": (lambda patch, m: None, "probe_fp16_d128_causal", set()),
    "a constexpr": (_other_constexpr, "fp16_d128_dense", {"forward"}),
    "a tile": (_other_tile, "fp16_d128_dense", {"forward"}),
    "the cost of a tile": (
        lambda patch, m: patch.setattr(m["schedule"], "TILE_COST", 3.0),
        "probe_fp16_d128_causal",
        {"forward"},
    ),
    "the heads in flight": (
        lambda patch, m: patch.setattr(m["schedule"], "L2_BYTES", 8 << 20),
        "probe_fp16_d128_causal_2k",
        {"forward"},
    ),
    "the order of tiles": (_reversed_order, "probe_fp16_d128_dense", {"forward"}),
    "a factor of the softmax": (
        lambda patch, m: patch.setattr(m["launch"], "LOG2_E", 1.442696),
        "fp16_d128_dense",
        {"forward"},
    ),
    "the grid of the combine": (
        lambda patch, m: patch.setattr(m["launch"], "COMBINE_ROWS", 8),
        "fp16_d128_splits",
        {"forward"},
    ),
    "the order of key tiles": (_reversed_key_tiles, "probe_backward_d64_gqa", {"backward"}),
    "how pages are copied": (
        lambda patch, m: patch.setattr(m["variant"], "SWIZZLED_BYTES", 64),
        "fp16_d128_pages16_causal",
        {"paged"},
    ),
    "what is recorded": (
        lambda patch, m: patch.setattr(m["launch"], "LOG2_E", 1.442696),
        "fp16_d64_stamps",
        {"timeline"},
    ),
    "a launch option of the quantiser": (
        lambda patch, m: patch.setattr(m["quantize"], "MEAN_WARPS", 8),
        "quantize_d128_k_mean",
        {"quantize"},
    ),
    "the signs of the rotation": (
        lambda patch, m: patch.setattr(
            m["quantize"].QuantizeOptions, "signs", lambda self, head_dim: np.ones(head_dim, np.float32)
        ),
        "quantize_d64_rotated",
        {"quantize"},
    ),
}


@pytest.mark.optional
@needs_triton
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_gpu_gets_makes_its_own_evidence_stale(name, modules, monkeypatch):
    change, probe, stale = CHANGES[name]
    before = hashes(monkeypatch, {probe})
    forget()
    change(monkeypatch, modules)
    after = hashes(monkeypatch, {probe})
    assert {of for of in EVIDENCE if after[of] != before[of]} == stale


@pytest.mark.parametrize(
    ("kernel", "of"),
    [
        ("fp16_d128_dense/forward_fp16", "forward"),
        ("fp16_d128_splits/combine", "forward"),
        ("fp16_d128_lockstep/forward_lockstep", "forward"),
        ("e4m3_d128_stamps/forward_fp8", "timeline"),
        ("quantize_d64_plain/quantize", "quantize"),
        ("fp16_d128_pages16_causal/packed_order", "paged"),
        ("append_bf16_rotated/append", "paged"),
    ],
)
def test_evidence_is_of_the_accepted_ptx(kernel, of, monkeypatch):
    before, rows = {x: evidence_sha256(x) for x in EVIDENCE}, accepted_rows()
    rows[kernel] |= {"ptx_sha256": "0" * 64}
    monkeypatch.setattr(evidence, "accepted_rows", lambda: rows)
    assert {x for x in EVIDENCE if evidence_sha256(x) != before[x]} == {of}


def test_another_kernel_of_one_launch_leaves_the_keys_of_all_others(monkeypatch):
    """One hash over all launches of the forward once voided 1.3 billion outputs when one variant changed."""
    measured, before, rows = evidence_sha256("forward"), launch_keys("forward"), accepted_rows()
    monkeypatch.setattr(changes, "_measured", lambda: {measured: before})
    assert changed_since("forward", measured) == set()
    rows["fp16_d128_splits/combine"] |= {"ptx_sha256": "0" * 64}
    monkeypatch.setattr(evidence, "accepted_rows", lambda: rows)
    assert changed_since("forward", measured) == {"fp16_d128_splits"}
    assert changed_since("forward", "0" * 64) == {*before}, "of launches that nobody kept all count as changed"
    assert changed_since("forward", "0" * 64, before) == {"fp16_d128_splits"}
    del rows["fp16_d64_dense/forward_fp16"]
    monkeypatch.setattr(evidence, "accepted_rows", rows.copy)
    assert changed_since("forward", measured) == {"fp16_d128_splits", "fp16_d64_dense"}


def test_a_launch_that_was_not_looked_at_then_has_changed(monkeypatch):
    """Rows of head_dim 80 were measured on the kernel of 128 channels, before there was a launch of 96."""
    then = {probe: key for probe, key in launch_keys("forward").items() if not probe.startswith("fp16_d96_")}
    monkeypatch.setattr(changes, "_measured", lambda: {"0" * 64: then})
    assert changed_since("forward", "0" * 64) == launch_keys("forward").keys() - then.keys() != set()


@pytest.mark.parametrize("path", PROVENANCE, ids=lambda path: "/".join(path.parts[-4:]))
def test_the_launches_that_committed_evidence_names_are_todays_or_kept(path):
    facts = json.loads(path.read_text())
    for run in facts.get("runs") or [facts]:
        of, sha256 = facts["evidence_of"], run["launches_sha256"]
        then = run.get("launches") or changes._measured().get(sha256)
        assert then or sha256 == evidence_sha256(of), "nobody can tell which of its launches have changed"


def test_every_audited_launch_is_bound_by_its_ptx_and_every_other_by_what_it_is_given():
    compiled = {x.name for x in audited()}
    assert {x.name for x in probes()} == {name.partition("/")[0] for name in accepted_rows()}
    for name, row in accepted_rows().items():
        assert ("ptx_sha256" in row) == (name.partition("/")[0] in compiled)
        assert row["launch"]["of"] in EVIDENCE


def test_a_word_that_nothing_is_evidence_of_is_refused():
    with pytest.raises(ValueError, match=r"must be of forward, packed, paged, quantize, .* launches, got 'combine'"):
        evidence_sha256("combine")  # type: ignore[arg-type]


LAUNCH: dict[str, Any] = {"args": (1, 2.0, True, None, "x"), "grid": (4,), "options": {"num_warps": 4}}


@pytest.mark.parametrize(
    "other",
    [
        {"grid": (5,)},
        {"options": {"num_warps": 8}},
        {"args": (1, 2.0, True, None, "y")},
        {"args": (1, 2.0, 1, None, "x")},
        {"args": (1.0, 2.0, True, None, "x")},
        {"args": (2.0, 1, True, None, "x")},
        {"args": ((1, 2.0), True, None, "x")},
    ],
    ids=str,
)
def test_every_part_of_a_launch_is_in_its_hash(other):
    assert launch_sha256(**LAUNCH | other) != launch_sha256(**LAUNCH)


def test_a_table_counts_by_type_shape_and_content():
    table = np.arange(6)
    variants = [table, table[::-1], table.reshape(2, 3), table.astype(np.int32)]
    assert len({launch_sha256((x,), (1,), {}) for x in variants}) == len(variants)
    assert launch_sha256((table,), (1,), {}) == launch_sha256((table.copy(),), (1,), {})


def test_an_argument_of_an_unknown_kind_is_refused():
    with pytest.raises(TypeError, match="must be a number, a record or a tensor, got object"):
        launch_sha256((object(),), (1,), {})


def rows(name: str) -> list[dict[str, str]]:
    return read_csv(H200 / "bits" / name)


def test_the_recorded_kernel_equals_its_twin_in_every_bit_and_broken_twins_do_not():
    cases = rows("gluon_forward_bits.csv")
    facts = json.loads((H200 / "bits" / "gluon_forward_bits_provenance.json").read_text())
    for dtype in facts.get("dtypes", ("fp16", "bf16")):
        assert sum(int(r["values"]) for r in cases if r["dtype"] == dtype) > 10**8
    assert all(int(r[name]) == 0 for r in cases for name in ("values_differing", "lse_differing", "variants_differing"))
    assert all(int(r["values_differing"]) > 0 for r in rows("gluon_forward_controls.csv"))
