"""Stored activations: their checksums, their shapes, and the reference results recorded with them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3verify.inputs import activations, captures
from fa3verify.inputs.recipe import Recipe

CASES = activations.list_activations()
FIRST = CASES[0].name


def _sidecar(case: activations.ActivationCase) -> dict:
    """Return what lies beside a file: provenance, licence, scale, checksums, statistics, reference results."""
    return json.loads((activations._FOLDER / f"{case.name}.json").read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable copy of the data that the module reads instead of the package's."""
    for name in ("MANIFEST.json", f"{FIRST}.npz"):
        shutil.copy(str(activations._FOLDER / name), tmp_path)
    monkeypatch.setattr(activations, "_FOLDER", tmp_path)
    activations.load_arrays.cache_clear()
    yield tmp_path
    activations.load_arrays.cache_clear()


def test_manifest_lists_18_files_with_50_query_heads_of_two_models():
    assert len(CASES) == 18
    assert sum(len(case.q_heads) for case in CASES) == 50
    assert {case.model for case in CASES} == {"SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"}


def test_package_data_is_attributed_and_names_no_local_path():
    notice = (activations._FOLDER / "NOTICE").read_text()
    for case in CASES:
        assert case.model in notice
        record = _sidecar(case)
        assert record["licence"] == "Apache-2.0"
        assert record["text"]["licence"] == "PSF-2.0"
        text = json.dumps(record)
        assert not re.search(r"(?<![\w.])/\w+/", text)  # no path of any machine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recorded_reference_results_are_reproduced(case: activations.ActivationCase):
    problem, q, k, v = captures.load(case.name)
    out, lse = attention(problem, q, k, v)
    for index, record in enumerate(_sidecar(case)["heads"]):
        got = {
            "sum_out": out[0, :, index].sum(),
            "sum_abs_out": np.abs(out[0, :, index]).sum(),
            "sum_lse": lse[0, index].sum(),
        }
        for key, value in got.items():
            want = record["check"][key]  # printed with 6 significant digits
            assert value == pytest.approx(want, rel=1e-5), f"{case.name} head {record['head']} {key}: {value} != {want}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_problem_carries_the_models_mask_scale_and_grouping(case: activations.ActivationCase):
    problem, q, k, v = captures.load(case.name, dtype="bf16")
    smollm = case.model.startswith("SmolLM2")
    assert (problem.group, problem.head_dim, problem.causal) == ((3, 64, True) if smollm else (1, 32, False))
    assert problem.softmax_scale == pytest.approx(problem.head_dim**-0.5, rel=1e-15)
    assert (q.shape, k.shape, v.shape) == (problem.q_shape, problem.k_shape, problem.v_shape)
    assert problem.dtype == "bf16"
    assert all(np.array_equal(x, x.astype(np.float16)) for x in (q, k, v))


def test_first_tokens_are_a_prefix():
    whole, part = captures.load(FIRST), captures.load(FIRST, tokens=65)
    assert part.problem.seqlen_q == part.problem.seqlen_k == 65
    assert all(np.array_equal(a[:, :65], b) for a, b in zip(whole[1:], part[1:], strict=True))


def test_loaded_arrays_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        activations.load_arrays(FIRST)[0][0, 0, 0] = 1


@pytest.mark.parametrize("tokens", [-1, 10_000])
def test_tokens_outside_the_file_are_refused(tokens: int):
    with pytest.raises(ValueError, match=f"got {tokens}"):
        captures.load(FIRST, tokens=tokens)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="got 'nothing'"):
        captures.load("nothing")


def test_damaged_npz_is_refused_by_name(folder: Path):
    path = folder / f"{FIRST}.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=rf"{FIRST}\.npz must have sha256 .* damaged"):
        captures.load(FIRST)


def test_missing_npz_is_refused_by_name(folder: Path):
    (folder / f"{FIRST}.npz").unlink()
    with pytest.raises(ValueError, match=rf"{FIRST}\.npz must be readable"):
        captures.load(FIRST)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sidecars_agree_with_the_manifest_and_the_arrays(case: activations.ActivationCase):
    record = _sidecar(case)
    facts = {name: getattr(case.whole, name) for name in ("head_dim", "causal", "softmax_scale")}
    facts |= {"model": case.model, "layer": case.layer, "seqlen": case.seqlen, "npz_sha256": case.sha256}
    assert {name: record[name] for name in facts} == facts
    for name, array in zip("qkv", activations.load_arrays(case.name), strict=True):
        assert hashlib.sha256(array.tobytes()).hexdigest() == record["arrays"][name]["sha256"], name


def test_recipe_of_activations_draws_the_stored_values():
    problem, *stored = captures.load(FIRST, tokens=64)
    recipe = Recipe("activations", {"name": FIRST, "tokens": 64}, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(recipe.draw(problem), stored, strict=True))
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_recipe_of_activations_refuses_a_problem_that_does_not_fit():
    problem = captures.load(FIRST, tokens=64).problem
    with pytest.raises(ValueError, match="seqlen_k must be 65, got 64"):
        Recipe("activations", {"name": FIRST, "tokens": 65}).draw(problem)
