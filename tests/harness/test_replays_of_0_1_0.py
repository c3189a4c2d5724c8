"""Replay files written by 0.1.0 (schema fa3verify.replay/1) read, run and end as they did then.

``replays/expected.json`` was written by 0.1.0 as well: verdicts, digests of inputs, operands and results of the
kernel, every call that a law makes, and every figure. It is not to be renewed: a file that ends otherwise is a change
for those who keep such files. One exception: the figures of the error bound, which was mended since; of them only the
verdict is compared, and a kernel that is outside its stated order fails now. Digests have every NaN as one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import typing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from fa3verify.campaign import replay_files
from fa3verify.cases.case import Case
from fa3verify.commands import replay
from fa3verify.judging.verdict import Part
from fa3verify.kernels import record
from fa3verify.known import registry

HERE = Path(__file__).parent / "replays"
FILES = tuple(sorted(path for path in HERE.glob("*.json") if path.name != "expected.json"))
EXPECTED = json.loads((HERE / "expected.json").read_text())
# Figures that do not pass through float64 sums and powers, which differ in the last digits from machine to machine.
EXACT = ("outputs", "nonfinite", "bit_equal", "bits_differing")
OF_THE_BOUND = ("unbounded", "ratio_max", "ratio_median", "ratio_lse_max")
# Fields of later versions, which no file of 0.1.0 can have: "Record.field".
SINCE = frozenset(
    {
        "Case.operation",
        "Config.warp_specialized",
        "Config.softmax_stages",
        "Config.integer_max",
        "Config.head_dim_v",
        "Config.family",
        "AttentionProblem.sinks",
        "AttentionProblem.term",
        "AttentionProblem.top_left",
        "AttentionProblem.attention_chunk",
        "AttentionProblem.qv",
        "AttentionProblem.cache",
    }
)
# One law at least of each module of laws.
LAWS = {
    "bounded": "error_within_bound",
    "bounded, long rows": "error_within_bound_on_long_rows",
    "values": "split_keys_merge_by_lse",
    "structure, varlen": "varlen_equals_separate_calls",
    "structure, heads": "grouped_heads_equal_repeated_heads",
    "structure, order": "order_of_sequences_and_heads",
    "structure, schedule": "schedule_switches_change_no_bit",
    "exact": "block_descale_moves_into_stored_values",
    "policy": "special_values_follow_policy",
    "rotation": "rotation_and_centring_keep_attention",
}


@pytest.fixture(autouse=True)
def _beside_third_party(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(sys, "path", list(sys.path))


def case_of(body: replay_files.ReplayFile) -> Case:
    content = body.content
    return Case.from_json(content["case"] if body.what.part is Part.LAW else content)


def digest(*arrays: np.ndarray | None) -> str:
    """Return the SHA-256 of dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for x in arrays:
        if x is None:
            continue
        one_nan = np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
        total.update(f"{x.dtype} {x.shape} ".encode() + np.ascontiguousarray(one_nan).tobytes())
    return total.hexdigest()


def digests(body: replay_files.ReplayFile, kernel: str | None) -> dict[str, str]:
    """Draw a file's case, run the kernel on it as it stands, and return what came of it."""
    case, asked = case_of(body), registry.find(kernel or body.kernel)
    arrays, prepared = case.draw()
    seen = prepared.operands
    descales = [x and x.values for x in (seen.q_descale, seen.k_descale, seen.v_descale)]
    result = asked.code.run(case.problem, seen, asked.config_for(case.problem, case.changes))
    return {
        "inputs": digest(*arrays),
        "operands": digest(seen.q, seen.k, seen.v, *descales),
        "out": digest(result.out),
        "lse": digest(result.lse),
    }


def recorded(kernel: record.Kernel, calls: list) -> record.Kernel:
    """Return a kernel that notes every call, and of its twin: what differs from its configuration, and a digest of
    operands and result.
    """

    def run(problem, operands, config):
        usual = kernel.code.configure(problem)
        own = {f.name: getattr(config, f.name) for f in fields(config)}
        changes = [f"{key}={value}" for key, value in sorted(own.items()) if value != getattr(usual, key)]
        result = kernel.code.run(problem, operands, config)
        calls.append([" ".join(changes), digest(operands.q, operands.k, operands.v, *result)])
        return result

    return replace(kernel.altered(run=run), twin=kernel.twin and recorded(kernel.twin, calls))


def differences(name: str, got: dict[str, float] | None, expected: dict[str, float] | None) -> list[str]:
    """List the figures that moved."""
    if got is None or expected is None:
        return [] if got is expected else [f"{name}: measures {got}, expected {expected}"]
    moved = [f"{name}: {key} is gone" for key in expected if key not in got]
    for key in (expected.keys() & got.keys()) - set(OF_THE_BOUND):
        rel, least = (0.0, 0.0) if key in EXACT else (1e-6, 1e-13)
        if not math.isclose(got[key], expected[key], rel_tol=rel, abs_tol=least):
            moved.append(f"{name}: {key} = {got[key]!r}, expected {expected[key]!r}")
    return moved


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_of_0_1_0_ends_as_it_did(path, monkeypatch):
    expected, calls = EXPECTED[path.stem], []
    body = replay_files.read(path)
    find = registry.find
    with monkeypatch.context() as patched:
        patched.setattr(registry, "find", lambda name: recorded(find(name), calls))
        holds, message, measures = replay.run(body, expected["kernel"])
    found_since = bool((measures or {}).get("outside"))  # by the enclosure, which 0.1.0 did not have
    assert holds is (expected["holds"] and not found_since), message
    assert message.split()[:3] == expected["message"].split()[:3]
    if expected["numbers"]:  # values of a law broken bit for bit
        assert re.findall(r"[-\d.e]*\d", message) == expected["numbers"]
    assert digests(body, expected["kernel"]) == expected["digests"]
    assert calls == expected["calls"]
    assert not differences(path.stem, measures, expected["measures"])


def test_there_are_twenty_files_and_each_is_expected():
    assert len(FILES) == 20
    assert {path.stem for path in FILES} == set(EXPECTED)
    assert {json.loads(path.read_text())["version"] for path in FILES} == {"0.1.0"}


def _usual(record, field) -> object:
    """Value that a field has where nobody chose it; None where it must be chosen."""
    if type(record).__name__ == "AttentionProblem":
        usual = {"head_dim_v": record.head_dim, "softmax_scale": 1 / math.sqrt(record.head_dim)}
        sizes = {"batch": 1, "nheads": 1, "nheads_kv": 1}
        return (usual | sizes).get(field.name, field.default)
    return field.default


def _chosen() -> tuple[set[str], set[str]]:
    """All fields of the records of replay files, and those that some file gives a value of its own."""
    every, chosen = set(), set()
    for path in FILES:
        case = case_of(replay_files.read(path))
        for part in (case, case.problem, case.recipe, case.scheme, *case.recipe.edits):
            if part is not None:
                name = type(part).__name__
                every |= {f"{name}.{f.name}" for f in fields(part)}
                given = [f.name for f in fields(part) if getattr(part, f.name) != _usual(part, f)]
                chosen |= {f"{name}.{field}" for field in given}
        kernel = registry.find(EXPECTED[path.stem]["kernel"] or case.kernel)
        every |= {f"Config.{f.name}" for f in fields(kernel.code.configure(case.problem))}
        chosen |= {f"Config.{name}" for name, _ in case.changes}
    return every, chosen


def test_every_field_of_every_record_has_a_value_of_its_own_somewhere():
    every, chosen = _chosen()
    assert {name.split(".")[0] for name in every} == {
        "AttentionProblem",
        "Case",
        "Config",
        "Edit",
        "QuantScheme",
        "Recipe",
    }
    # the operands' format decides the kernel's: it cannot be changed
    assert every - chosen - SINCE == {"Config.dtype"}


def test_every_kind_of_edit_scheme_law_and_verdict_occurs():
    bodies = [replay_files.read(path) for path in FILES]
    cases = [case_of(body) for body in bodies]
    edits = [edit for case in cases for edit in case.recipe.edits]
    schemes = [case.scheme for case in cases if case.scheme]
    kinds = typing.get_args(typing.get_type_hints(type(edits[0]))["kind"])
    assert {edit.kind for edit in edits} >= set(kinds)
    assert {edit.tensor for edit in edits} == set("qkv")
    assert {str(edit.value) for edit in edits} >= {"nan", "inf", "-inf"}
    assert {scheme.granularity for scheme in schemes} == {"tensor", "head", "block", "row"}
    assert {body.what.subject for body in bodies} >= set(LAWS.values())
    first = {" ".join(str(body.what).split()[:2]) for body in bodies if body.what.part is not Part.LAW}
    assert first >= {"largest error", "L0 bits", "L1 error", "L1 lse", "L2 rel_rmse_seen", "L2 abs_bias"}
    assert {case.problem.dtype for case in cases} == {"fp16", "bf16", "e4m3"}
    assert {expected["holds"] for expected in EXPECTED.values()} == {True, False}


def test_every_distribution_of_0_1_0_is_drawn():
    drawn = {case_of(replay_files.read(path)).recipe.distribution for path in FILES}
    assert drawn == {
        "activations",
        "aligned_outliers",
        "antialigned_outliers",
        "block_scaled",
        "cancelling_v",
        "constant_rows",
        "fa3_outliers",
        "huge",
        "needle",
        "normal",
        "offset_v",
        "outlier_channels",
        "peaky",
        "positive",
        "ramp",
        "sink",
        "subnormals",
        "ties",
        "tiny",
    }
