"""A user's own activations: files of q, k and v, pinned by their content, refused by name, judged like any input."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import fa3verify
from fa3_reference.attention import attention
from fa3verify.campaign import replay_files, tasks as campaign
from fa3verify.campaign.findings import MovedFigure
from fa3verify.campaign.introduction import introduce_all
from fa3verify.campaign.plan import JudgeCapture, plan
from fa3verify.campaign.pool import IsolatingPool
from fa3verify.campaign.profiles import PROFILES, captured_case
from fa3verify.campaign.run import Run
from fa3verify.campaign.summary import summarize
from fa3verify.cases.case import Case
from fa3verify.cli.main import main
from fa3verify.commands import replay
from fa3verify.inputs import captures
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.verdict import What
from fa3verify.known import registry

ROOT = Path(__file__).parents[3]


def tensors(nheads: int = 4, nheads_kv: int = 2, tokens: int = 70, head_dim: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {"q": (nheads, tokens, head_dim), "k": (nheads_kv, tokens, head_dim), "v": (nheads_kv, tokens, head_dim)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def stored(folder: Path, name: str = "layer00.npz", **more) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / name, **tensors() | more)
    return folder / name


def recipe_of(capture: captures.Capture, tokens: int = 0) -> Recipe:
    return Recipe("captured", {"file": capture.file, "sha256": capture.sha256, "tokens": tokens})


def test_q_k_and_v_are_enough(tmp_path):
    problem, q, k, v = fa3verify.load_activations(stored(tmp_path))
    assert (problem.nheads, problem.nheads_kv, problem.seqlen_q, problem.seqlen_k) == (4, 2, 70, 70)
    assert (problem.causal, problem.window, problem.softmax_scale) == (False, (-1, -1), 0.125)
    for got, want in zip((q, k, v), tensors().values(), strict=True):
        assert np.array_equal(got[0].swapaxes(0, 1), want)  # unrounded


def test_semantics_in_the_file_are_the_problems(tmp_path):
    said = {"causal": True, "window": (5, 0), "softcap": 30.0, "softmax_scale": 0.3}
    problem = fa3verify.load_activations(str(stored(tmp_path, **said)), dtype="bf16", tokens=9).problem
    assert {name: getattr(problem, name) for name in said} == said
    assert (problem.dtype, problem.seqlen_k) == ("bf16", 9)


def test_one_function_loads_shipped_activations_by_name_as_well():
    name = "smollm2_dev-prose2_n129_L08_kv2"
    assert fa3verify.load_activations(name).problem == fa3verify.load_activations(name, tokens=129).problem


def test_a_recipe_draws_what_the_file_holds_and_survives_json(tmp_path):
    (capture,) = captures.list_captures(stored(tmp_path))
    problem, *arrays = captures.load(capture.file, tokens=33)
    recipe = recipe_of(capture, 33)
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert all(np.array_equal(a, b) for a, b in zip(again.draw(problem), arrays, strict=True))


def test_another_file_in_its_place_is_refused_by_name(tmp_path):
    (capture,) = captures.list_captures(stored(tmp_path))
    stored(tmp_path, causal=True)
    with pytest.raises(ValueError, match=rf"layer00\.npz must have sha256 {capture.sha256}.*it is another file"):
        recipe_of(capture).draw(capture.problem())
    with pytest.raises(ValueError, match="sha256 must be the first 16 hex digits"):
        Recipe("captured", {"file": capture.file}).draw(capture.problem())


def spoiled(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        path.write_bytes(data[:500] + bytes([data[500] ^ 255]) + data[501:])
    elif how == "npy":
        with path.open("wb") as file:
            np.save(file, tensors()["q"])
    else:
        path.write_bytes(b"not a zip file")


@pytest.mark.parametrize("how", ["truncated", "flipped", "npy", "foreign"])
def test_a_damaged_file_is_refused_by_name(tmp_path, how):
    path = stored(tmp_path)
    spoiled(path, how)
    with pytest.raises(ValueError, match=r"layer00\.npz must be an npz file of q, k and v"):
        captures.list_captures(tmp_path)


class Trap:
    """What a pickle would make of itself."""

    def __reduce__(self):
        return (Path.touch, (Path("sprung"),))


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"q": np.array([Trap()], object)}, "allow_pickle=False"),
        ({"text": np.array("a prompt")}, "unknown key 'text'"),
        ({"v": np.zeros((2, 69, 64), np.float16)}, "same tokens"),
        ({"v": np.zeros((1, 70, 64), np.float16)}, "k and v the same heads"),
        ({"q": np.zeros((4, 70, 128), np.float16)}, "one head_dim"),
        ({"q": np.zeros((3, 70, 64), np.float16)}, "nheads must be a multiple of nheads_kv"),
        ({"k": np.zeros((2, 70, 64), np.int8)}, "k must be float16, float32 or float64, got int8"),
        ({"k": np.zeros((2, 70, 64), "V2")}, "store bfloat16 as float32"),
        ({"k": np.zeros((70, 64))}, "heads, tokens, head_dim"),
        ({"k": np.full((2, 70, 64), np.nan)}, "k must be finite"),
        ({"softmax_scale": -1.0}, "softmax_scale must be finite and > 0"),
        ({"window": "wide"}, "window must be two integers"),
    ],
)
def test_a_foreign_file_is_refused_by_name_and_rule_and_never_unpickled(tmp_path, monkeypatch, changed, rule):
    monkeypatch.chdir(tmp_path)
    path = stored(tmp_path, **changed)
    with pytest.raises(ValueError, match=rf"layer00\.npz must be an npz file of q, k and v: .*{re.escape(rule)}"):
        captures.list_captures(path)
    assert not Path("sprung").exists()


def test_a_file_without_keys_and_a_folder_without_files_are_refused(tmp_path):
    np.savez(tmp_path / "half.npz", q=tensors()["q"])
    with pytest.raises(ValueError, match=r"half\.npz must be .*'k is not a file"):
        captures.list_captures(tmp_path)
    with pytest.raises(ValueError, match=r"nothing holds no \.npz file|nothing cannot be read"):
        captures.list_captures(tmp_path / "nothing")


def test_values_beyond_fp16_are_for_kernels_whose_format_holds_them(tmp_path):
    (capture,) = captures.list_captures(stored(tmp_path, v=tensors()["v"] * 1e5))
    quick = PROFILES["quick"]
    taken = {name: captured_case(registry.find(f"twin.{name}"), capture, quick, 0) for name in ("bf16", "e4m3")}
    assert all(taken.values())
    assert captured_case(registry.find("twin.fp16"), capture, quick, 0) is None
    with pytest.raises(ValueError, match=r"layer00\.npz holds values up to .*, fp16 ends at 65504"):
        capture.problem()


def test_a_damaged_file_ends_verify_before_anything_runs(tmp_path):
    spoiled(stored(tmp_path / "own"), "truncated")
    asked = ["verify", "twin.fp16", "--quick", "--activations", str(tmp_path / "own"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 2
    assert "layer00.npz must be an npz file" in result.stderr
    assert not (tmp_path / "out").exists()


def judged(kernels: tuple[str, ...], folder: Path) -> Run:
    """The run of a campaign on a user's files alone, by worker processes."""
    own = captures.list_captures(folder)
    pool = IsolatingPool(1, 60.0)
    introductions = introduce_all(kernels, "quick", pool, own)
    planned = plan(introductions, "quick", 0, own)
    outcomes = campaign.execute([task for task in planned if isinstance(task, JudgeCapture)], pool)
    pool.shutdown()
    return summarize(introductions, outcomes, None, profile="quick", seed=0)


def test_kernels_are_judged_on_own_files_and_replays_find_them_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored(Path("own"))
    stored(Path("own"), "layer 01.npz", causal=True, **tensors(head_dim=48))  # which cannot be rotated
    stored(Path("own"), "windows.npz", window=(9, 9), **tensors(head_dim=48))
    summary = judged(("twin.e4m3", "twin.fp16+wrong_softmax_scale", "twin.quantize"), Path("own"))
    families = {k.name: [f.family for f in k.families] for k in summary.kernels}
    assert set(map(tuple, families.values())) == {("captured:layer_01", "captured:layer00", "captured:windows")}
    ratios = {k.name: k.worst_ratio for k in summary.kernels}
    assert ratios["twin.e4m3"] < 1
    assert ratios["twin.fp16+wrong_softmax_scale"] > 1
    written = replay_files.write_all(summary, Path("out"))
    failed = next(f for f in written.failures if str(f.what) == "L1 error / bound")
    body = replay_files.read(Path("out") / failed.replay)
    assert not replay.run(body)[0]
    assert replay.run(body, "twin.fp16")[0]
    shutil.move("own", "moved")
    captures.pinned.cache_clear()  # another process knows nothing of it
    with pytest.raises(ValueError, match=r"own/layer.*\(sha256 \w{16}\.\.\.\) cannot be read"):
        replay.run(body)
    assert fa3verify.replay(Path("out") / failed.replay, activations="moved").measures is not None
    stored(Path("moved"), Path(Case.from_json(body.content).recipe.settings["file"]).name, softcap=1.0)
    captures.pinned.cache_clear()
    result = CliRunner().invoke(main, ["replay", str(Path("out") / failed.replay), "--activations", "moved"])
    assert (result.exit_code, "it is another file" in result.stderr) == (2, True)


def test_a_figure_that_moved_on_an_own_file_is_compared_again_on_that_file(tmp_path):
    (capture,) = captures.list_captures(stored(tmp_path))
    kernel = registry.find("twin.fp16")
    case = captured_case(kernel, capture, PROFILES["quick"], 0)
    assert case is not None
    moved = MovedFigure("captured:layer00", "quick", 0, "rel_rmse_seen", limit=0.0, baseline=None)
    body = replay_files.ReplayFile("twin.fp16", What.from_json("L2 rel_rmse_seen"), case.to_json())
    figure = fa3verify.judge(kernel, case).measures["rel_rmse_seen"]
    for factor, holds in ((1.01, True), (0.99, False)):
        stored_figure = replace(moved, limit=figure * factor, baseline=figure)
        assert replay.run(replace(body, baseline=stored_figure))[0] is holds


@pytest.mark.optional
def test_the_recipe_of_the_docs_captures_what_attention_is_given(tmp_path, monkeypatch):
    """The exact output for the captured q, k and v is what the model's attention gave: they are after rotation."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers")
    page = (ROOT / "docs" / "activations.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("captures").mkdir()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = llama.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    llama.LlamaForCausalLM(config).save_pretrained("tiny")
    tokens, seen, names = torch.randint(64, (1, 70)), [], {}
    exec(code.rpartition("\n\n")[0], names)
    opening, _, run = code.rpartition("model(tokens)")
    names |= {"name": "tiny", "tokens": tokens}
    exec(opening.rpartition("\n\n")[2], names)
    for layer in names["model"].model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, given, out: seen.append(given[0].numpy()))
    exec(f"model(tokens){run}", names)
    for capture, out in zip(captures.list_captures("captures"), seen, strict=True):
        problem, *arrays = captures.load(capture.file)
        assert problem.causal
        exact = attention(problem, *arrays).out.reshape(out.shape)
        assert np.max(np.abs(exact - out)) < 1e-5 * np.max(np.abs(out))
    assert fa3verify.judge("twin.e4m3", problem, recipe_of(capture)).measures["ratio_max"] < 1
