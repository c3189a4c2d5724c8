"""A draft says what a bare function takes, as trials show it; it declares nothing away that no contract explains."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fa3verify.campaign import drafts
from fa3verify.campaign.pool import processes
from fa3verify.cli.main import main
from fa3verify.commands import declare
from fa3verify.kernels.loading import parameters
from fa3verify.kernels.policy import Policy

FILE = str(Path(__file__).with_name("bare_functions.py"))
NUMPY = {"library": "numpy", "dtypes": ("fp16",), "head_dims": (64,)}
FIRST = drafts.PLAIN[:1]


def keywords(text: str) -> dict[str, str]:
    """Return the keywords of a draft as they are written."""
    (function,) = ast.parse(f"{text}\ndef f(): ...").body
    assert isinstance(function, ast.FunctionDef)
    (call,) = function.decorator_list
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.unparse(each.value) for each in call.keywords}


def drafted(name: str) -> str:
    return declare.declare(f"{FILE}:{name}", 2, lambda word: None)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("of_heads", {"like": "sdpa", "features": ()}),
        ("of_tokens", {"like": "flash_attn", "features": ()}),
        ("always_causal", {"like": "sdpa", "features": (), "always": ("causal",)}),
        ("with_weights", {"like": "sdpa", "features": ("attn_mask",)}),
        ("of_one_length", {"like": "sdpa", "features": (), "softmax_scale": 1.0}),
        ("of_packed", {"like": "flash_attn_varlen", "features": (), "always": ("causal", "varlen")}),
    ],
)
def test_a_function_is_called_by_its_own_names(name, facts):
    assert drafts.tried(f"{FILE}:{name}", NUMPY | facts, FIRST) == (1, 1, "")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("of_heads", {"like": "flash_attn", "features": ()}),
        ("always_causal", {"like": "sdpa", "features": ()}),
        ("with_weights", {"like": "sdpa", "features": ("bias",)}),
        ("off_by_a_hundredth", {"like": "sdpa", "features": ()}),
    ],
    ids=["layout", "mask", "meaning of a mask", "wrong"],
)
def test_a_call_of_another_meaning_is_not_right(name, facts):
    calls = drafts.features(f"{FILE}:{name}", "sdpa").get(*facts["features"], FIRST) if facts["features"] else FIRST
    right, returned, raised = drafts.tried(f"{FILE}:{name}", NUMPY | facts, calls)
    assert (right, raised) == (0, "")
    assert returned == len(calls)


def test_the_ways_to_call_a_function_follow_from_its_arguments():
    told = drafts.callings(f"{FILE}:of_heads")
    silent = drafts.callings(f"{FILE}:always_causal")
    assert {facts["like"] for facts in told} == {"sdpa", "flash_attn"}
    assert not any("always" in facts for facts in told)
    half = len(silent) // 2
    assert [facts.get("always") for facts in silent] == [None] * half + [("causal",)] * half
    packed = drafts.callings(f"{FILE}:of_packed")
    assert {(facts["like"], facts.get("always")) for facts in packed} == {
        ("flash_attn_varlen", None),
        ("flash_attn_varlen", ("causal", "varlen")),
    }


def test_features_are_those_that_a_function_has_arguments_for():
    assert set(drafts.features(f"{FILE}:of_heads", "sdpa")) == {"causal", "gqa"}
    assert set(drafts.features(f"{FILE}:with_weights", "sdpa")) == {"bias", "bias_fp32", "attn_mask", "gqa"}


def test_a_function_without_an_argument_for_a_scale_may_have_none():
    silent = drafts.callings(f"{FILE}:of_one_length")
    assert {facts.get("softmax_scale") for facts in silent} == {None, 1.0}
    assert not any("softmax_scale" in facts for facts in drafts.callings(f"{FILE}:of_heads"))


def test_a_mask_of_keys_must_mean_those_that_count():
    calls = drafts.features(f"{FILE}:padded", "sdpa")["key_padding"]
    facts = NUMPY | {"like": "sdpa", "features": ("key_padding",)}
    assert drafts.tried(f"{FILE}:padded", facts, calls) == (len(calls), len(calls), "")
    assert drafts.tried(f"{FILE}:padded_by_hidden_keys", facts, calls)[:2] == (0, len(calls))
    tried = [("features", "key_padding", (0, 4, "")), ("policy", {}, (0, 0, ""))]
    drafted, seen = declare._composed({"like": "sdpa", "dtypes": ("fp16",)}, tried, (4, 4, ""), {"key_padding": FIRST})
    assert drafted["features"] == ()
    assert seen["features"] == ("Narrows the verdict: key_padding returned another result.",)


def test_a_format_in_which_nothing_is_right_tells_no_convention():
    names: list[str] = []
    scores = {"fp32": {"flash_attn": (0, 4, ""), "sdpa": (0, 2, "")}, "fp16": {}, "bf16": {"sdpa": (3, 4, "")}}

    def scored(executor: object, reference: str, tries: list[tuple[dict[str, Any], object]]) -> list[declare.Score]:
        return [scores[facts["dtypes"][0]].get(facts["like"], (0, 0, "raised")) for facts, _ in tries]

    with pytest.MonkeyPatch.context() as patch, processes(1, 60) as executor:
        patch.setattr(declare, "_scores", scored)
        facts, _ = declare._drafted(f"{FILE}:of_heads", executor, names.append)
    assert names[:3] == ["calls in fp32", "calls in fp16", "calls in bf16"]
    assert facts["like"] == "sdpa"
    assert facts["dtypes"] == ("bf16",)


def test_whatever_a_drafted_function_raises_is_a_refusal():
    q, k = np.zeros((1, 1, 2, 8)), np.zeros((1, 1, 3, 8))
    function = drafts.refusing(f"{FILE}:of_one_length")
    assert list(parameters(function)) == ["q", "k", "v"]
    assert list(parameters(drafts.refusing(f"{FILE}:applied"))) == ["q", "k", "v", "scale"]
    assert np.shape(function(q, q, q)) == q.shape
    with pytest.raises(NotImplementedError, match=r"RuntimeError.*the size of k must match"):
        function(q, k, k)


def test_what_returned_a_wrong_result_stays_in_a_draft():
    tried = [
        ("dtypes", "fp16", (0, 4, "")),
        ("dtypes", "bf16", (4, 4, "")),
        ("features", "window", (0, 4, "")),
        ("features", "gqa", (0, 4, "")),
        ("head_dims", 96, (0, 4, "")),
        ("head_dims", 80, (0, 0, "ValueError: 80")),
        ("policy", {}, (0, 4, "")),
        ("policy", {"policy": Policy(causal="top_left")}, (0, 4, "")),
    ]
    features = dict.fromkeys(("causal", "window", "gqa"), FIRST)
    facts, seen = declare._composed({"like": "sdpa", "dtypes": ("fp16",)}, tried, (0, 4, ""), features)
    assert facts == {
        "like": "sdpa",
        "dtypes": ("fp16", "bf16"),
        "features": ("causal", "window"),
        "head_dims": (96,),
    }
    assert seen["features"] == ("Narrows the verdict: gqa returned another result.",)
    assert seen["head_dims"] == ("Narrows the verdict: 80 raised ValueError: 80.",)


def test_the_format_in_which_a_function_returned_stays_in_a_draft():
    tried = [("dtypes", "fp16", (0, 0, "TypeError: ")), ("dtypes", "fp32", (0, 4, "")), ("policy", {}, (0, 0, ""))]
    facts, seen = declare._composed({"like": "sdpa", "dtypes": ("fp32",)}, tried, (0, 4, ""), {})
    assert facts["dtypes"] == ("fp32",)
    assert seen["dtypes"] == ("Narrows the verdict: fp16 raised TypeError: .",)


def test_what_a_campaign_asks_of_a_draft_is_declared_below_what_it_saw(monkeypatch):
    monkeypatch.setattr(declare, "DTYPES", ("fp16",))
    monkeypatch.setattr(declare, "HEAD_DIMS", (64,))
    seen = SimpleNamespace(case="f: b1 h1/1 1x0 d64", message="")
    asked = [
        SimpleNamespace(meaning="it refuses fewer than 1 keys (seen in a part)", seen=seen, kernel="x:f[min_seqlen=1]"),
        SimpleNamespace(meaning="empty is 0", seen=seen, kernel="x:f[min_seqlen=1,empty_out=mean]"),
    ]
    runs = [SimpleNamespace(questions=each, failures=(), kernels=[SimpleNamespace(cases=7)]) for each in (asked, ())]
    monkeypatch.setattr(declare, "_judged", lambda *facts: runs.pop(0))
    text = drafted("of_heads")
    assert keywords(text) == {
        "like": "'sdpa'",
        "library": "'numpy'",
        "dtypes": "('fp16',)",
        "features": "('causal',)",
        "head_dims": "(64,)",
        "min_seqlen": "1",
        "policy": "fa3verify.Policy(empty_out='mean', causal='top_left')",
    }
    assert "Of 7 fresh ones: 0 findings." in text
    above_sizes, _, above_policy = text.partition("(64,),")[2].partition("min_seqlen=1")
    assert "# Narrows the verdict: it refuses fewer than 1 keys. Seen: b1 h1/1 1x0 d64" in above_sizes
    assert "# Its contract: empty is 0. Seen: b1" in above_policy


def test_a_draft_is_judged_in_the_format_in_which_its_convention_was_found(monkeypatch):
    judged: list[str] = []
    monkeypatch.setattr(declare.verify, "run", lambda settings, progress: judged.extend(settings.kernels))
    for seed in (0, 1):
        declare._judged("x:f", {"like": "sdpa", "dtypes": ("fp32", "fp16", "bf16")}, seed, 1)
    assert [name.rpartition(".")[2] for name in judged] == ["fp32", "fp32"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("of_heads", {"features": "('causal',)", "min_seqlen": "1"}),
        ("of_tokens", {"like": "'flash_attn'", "features": "('causal',)", "library": "'numpy'"}),
        ("always_causal", {"always": "('causal',)", "equal_lengths": "True"}),
        ("with_weights", {"features": "('attn_mask',)"}),
        ("of_one_length", {"equal_lengths": "True", "softmax_scale": "1.0"}),
        ("padded", {"features": "('key_padding',)"}),
        ("padded_by_hidden_keys", {"features": "()"}),
    ],
)
def test_a_draft_of_a_right_function_leaves_no_finding(name, expected):
    text = drafted(name)
    assert expected.items() <= keywords(text).items()
    assert ": 0 findings." in text


@pytest.mark.nightly
def test_a_draft_acquits_no_wrong_function():
    text = drafted("off_by_a_hundredth")
    assert ": 0 findings." not in text
    assert "finding" in text.splitlines()[0]


def test_a_function_that_needs_what_nobody_knows_is_no_usage_of_the_verb():
    told = CliRunner().invoke(main, ["declare", f"{FILE}:of_tiles", "--quiet"])
    assert told.exit_code == 2
    assert "could not be called" in told.output
    assert "block_m" in told.output


def test_a_draft_is_written_above_its_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        '"""Mine."""\n\nfrom __future__ import annotations\n\nimport numpy\n\n\ndef f(q, k, v):\n    return q\n'
    )
    declare.write(f"{file}:f", '@fa3verify.kernel(\n    like="sdpa",\n)')
    text = file.read_text()
    assert "import fa3verify\nimport numpy\n" in text
    assert '@fa3verify.kernel(\n    like="sdpa",\n)\ndef f(q, k, v):' in text
    names: dict[str, object] = {}
    exec(compile(text, str(file), "exec"), names)
    with pytest.raises(ValueError, match="defines no function g"):
        declare.write(f"{file}:g", "")
