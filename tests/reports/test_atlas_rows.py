"""An atlas that somebody sends: the published ones are fine, and every mistake has its line and its place."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_reports.__main__ import main
from fa3_reports.atlas_rows import _is_legal, mistakes
from fa3verify.campaign import atlas
from fa3verify.files import read_text

PUBLISHED = [path.parent / atlas.FILE for path in sorted((Path(__file__).parents[2] / "reports/atlas").glob("*/*.xz"))]
KERNELS = {"pass": "gluon.fp16", "fail": "flash3.dew.fp16"}


def check(path: Path) -> tuple[int, list[str], str]:
    done = CliRunner().invoke(main, ["row", str(path)])
    return done.exit_code, done.stderr.splitlines(), done.stdout


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_published_atlases_are_fine(path):
    code, found, told = check(path)
    assert (code, found) == (0, [])
    assert told.startswith(f"{path}: its form is right")


@pytest.fixture
def sent(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """An atlas of a kernel that passes and one that fails, with the replay files that it names."""
    content = json.loads(read_text(next(path for path in PUBLISHED if path.parent.name == "h200")))
    kernels = [next(each for each in content["kernels"] if each["name"] == name) for name in KERNELS.values()]
    content["kernels"] = kernels
    content["failures"] = [found for found in content["failures"] if found["kernel"] == KERNELS["fail"]]
    for row in (*content["failures"], *(row for each in kernels for row in (*each["families"], *each["laws"]))):
        if row["replay"]:
            for folder in (tmp_path / "sent", tmp_path):
                (folder / row["replay"]).parent.mkdir(parents=True, exist_ok=True)
                (folder / row["replay"]).touch()
    return tmp_path / "sent" / "mine.json", content


def test_a_row_that_was_published_is_fine_alone(sent):
    path, content = sent
    path.write_text(json.dumps(content))
    assert check(path)[:2] == (0, [])


def figures(entry: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return entry["families"][number]


GATE = ("layer", "rule", "kernel", "family", "status", "observed", "limit", "baseline", "margin")
Damage = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], Any]
MUTILATED: dict[str, tuple[Damage, str]] = {
    "a count that does not add up": (
        lambda body, good, bad: good.update(cases=1000),
        ", the sum of its parts, got 1000",
    ),
    "a pass with a finding": (
        lambda body, good, bad: body["failures"][0].update(kernel=good["name"]),
        "kernels[0].verdict: expected no finding, and enough of what it claims tried, where it is 'pass', got 'law",
    ),
    "a pass whose findings were taken out": (
        lambda body, good, bad: (bad.update(verdict="pass"), body.update(failures=[], verdict="pass")),
        "kernels[1].verdict: expected no finding, and enough of what it claims tried, where it is 'pass'",
    ),
    "a pass that leaves its bound": (
        lambda body, good, bad: figures(good).update(ratio_lse_max="NaN"),
        "got 'figures of family normal'",
    ),
    "a pass with other bits than its twin": (
        lambda body, good, bad: figures(good, 4).update(bits_differing=1),
        "got 'figures of family peaky'",
    ),
    "a pass outside its stated order": (
        lambda body, good, bad: figures(good).update(outside=1),
        "got 'figures of family normal'",
    ),
    "a pass of which too little was tried": (
        lambda body, good, bad: (
            good["coverage"].update(share=1 / 3),
            good["coverage"]["kinds"]["batch"].update(tried=1),
        ),
        "kernels[0].verdict: expected no finding, and enough of what it claims tried, where it is 'pass', got 'no "
        "finding, 33% tried'",
    ),
    "no verdict and no reason": (
        lambda body, good, bad: good.update(verdict="inconclusive"),
        "kernels[0].verdict: expected no finding, and a reason, where it is 'inconclusive'",
    ),
    "judged, but said not to be run": (
        lambda body, good, bad: good.update(verdict="not run", inconclusive="no GPU"),
        "kernels[0].verdict: expected nothing judged, and a reason, where it is 'not run'",
    ),
    "no kernel": (
        lambda body, good, bad: body.update(kernels=[], failures=[], verdict="pass"),
        "kernels: expected at least one, got 0",
    ),
    "no name": (lambda body, good, bad: good.update(name=" "), "kernels[0].name: expected a name, got ' '"),
    "a finding of nobody": (
        lambda body, good, bad: body["failures"][0].update(kernel="mine"),
        "failures[0].kernel: expected one of the kernels, got 'mine'",
    ),
    "another verdict than its kernels have": (
        lambda body, good, bad: body.update(verdict="pass"),
        "verdict: expected 'fail', as its kernels have it, got 'pass'",
    ),
    "the gate of a run": (
        lambda body, good, bad: body.update(gate=[dict.fromkeys(GATE, None) | dict.fromkeys(GATE[:5], "")]),
        "gate: expected none in an atlas, got 1",
    ),
    "a family of unknown seeds": (
        lambda body, good, bad: good["families"][0].pop("seeds"),
        "kernels[0].families[0]: 'seeds' is missing",
    ),
    "a family that cannot be replayed": (
        lambda body, good, bad: good["families"][0].update(replay=None),
        "kernels[0].families[0]: 'replay' is missing",
    ),
    "a finding without a cause": (
        lambda body, good, bad: body["failures"][0].update(cause=None),
        "failures[0]: 'cause' is missing",
    ),
    "an operation that nobody knows": (
        lambda body, good, bad: bad.update(operation="sideways"),
        "kernels[1].operation: expected one of forward, quantize, backward, merge, got 'sideways'",
    ),
    "a family without a problem": (
        lambda body, good, bad: good["families"][0].update(cases=0),
        "kernels[0].families[0].cases: expected a whole number, at least 1, got 0",
    ),
    "a replay file that is reached from outside": (
        lambda body, good, bad: good["families"][0].update(replay="../worst/gluon.fp16.json"),
        "kernels[0].families[0].replay: expected a file below the folder of the atlas",
    ),
    "a fail without a finding": (
        lambda body, good, bad: good.update(verdict="fail"),
        "kernels[0].verdict: expected at least one finding, where it is 'fail', got 'no finding, 100% tried'",
    ),
    "a negative error": (
        lambda body, good, bad: figures(good).update(max_error=-0.5, rmse_seen=None),
        "kernels[0].families[0].max_error: expected 0 or more, a share at most 1, got -0.5",
    ),
    "no version": (
        lambda body, good, bad: body.update(version=""),
        "version: expected that of fa3verify, as 0.2.0, got ''",
    ),
    "a key that is missing": (lambda body, good, bad: good.pop("policy"), "kernels[0]: 'policy' is missing"),
    "a key that nobody knows": (lambda body, good, bad: good.update(speed=1), "kernels[0]: unknown key 'speed'"),
    "a number as a text": (
        lambda body, good, bad: good.update(outputs="many"),
        "kernels[0].outputs: must be int, got 'many'",
    ),
    "a verdict of one's own": (
        lambda body, good, bad: good.update(verdict="fine"),
        "kernels[0].verdict: fine not in literal",
    ),
    "a kernel of no dtype": (
        lambda body, good, bad: good.update(dtype=None),
        "kernels[0].dtype: expected that of a kernel that was judged, got None",
    ),
    "a misspelt figure": (
        lambda body, good, bad: figures(good).update(ratio_lse_maximum=figures(good).pop("ratio_lse_max")),
        "kernels[0].families[0].ratio_lse_maximum: expected a figure of this operation",
    ),
    "a figure left out": (
        lambda body, good, bad: figures(bad, 3).pop("ratio_max"),
        "kernels[1].families[3].ratio_max: expected a number, got None",
    ),
    "a mean above its maximum": (
        lambda body, good, bad: figures(good).update(rmse_seen=10.0),
        "kernels[0].families[0].rmse_seen: expected at most max_error, got 10.0",
    ),
    "one kernel twice": (
        lambda body, good, bad: (
            bad.update(name=good["name"]),
            [x.update(kernel=good["name"]) for x in body["failures"]],
        ),
        "kernels: expected every kernel once, got ['gluon.fp16']",
    ),
    "a family twice": (
        lambda body, good, bad: good["families"][1].update(family="normal"),
        "kernels[0].families: expected every family and property once, got [('normal', 2)]",
    ),
    "coverage that its counts do not give": (
        lambda body, good, bad: good["coverage"]["kinds"]["batch"].update(tried=1),
        "kernels[0].coverage.share: expected the least share of its kinds, got 1.0",
    ),
    "a bar that was lowered": (
        lambda body, good, bad: good["coverage"].update(required=0.0),
        "kernels[0].coverage.required: expected 0.75, got 0.0",
    ),
    "more tried than claimed": (
        lambda body, good, bad: good["coverage"]["kinds"]["batch"].update(tried=4),
        "kernels[0].coverage.kinds.batch.tried: expected 0 to 3, got 4",
    ),
    "a replay file that was not sent": (
        lambda body, good, bad: good["families"][0].update(replay="worst/other.json"),
        "kernels[0].families[0].replay: expected a file below the folder of the atlas, got 'worst/other.json'",
    ),
    "a replay file elsewhere": (
        lambda body, good, bad: good["families"][0].update(replay="/etc/passwd"),
        "kernels[0].families[0].replay: expected a file below the folder of the atlas, got '/etc/passwd'",
    ),
    "a loss without figure and reason": (
        lambda body, good, bad: good["loss"][0].update(rel_rmse=None),
        "kernels[0].loss[0].rel_rmse: expected a figure of 0 or more, or else a reason in missing, got None",
    ),
}


@pytest.mark.parametrize("name", MUTILATED)
def test_every_mistake_has_a_line_that_says_what_and_where(sent, name):
    path, content = sent
    damage, expected = MUTILATED[name]
    damage(content, *content["kernels"])
    path.write_text(json.dumps(content))
    code, found, told = check(path)
    assert (code, told) == (2, "")
    assert any(line.startswith(f"{path}: ") and expected in line for line in found), found
    assert len(found) <= 3, found  # and nothing that is right is called wrong


def test_all_mistakes_are_named_and_not_only_the_first(sent):
    path, content = sent
    good, bad = content["kernels"]
    good["outputs"] = None
    bad["families"][2]["seeds"] = [1.5]
    path.write_text(json.dumps(content))
    assert mistakes(path) == [
        "kernels[0].outputs: must be int, got None",
        "kernels[1].families[2].seeds[0]: must be int, got 1.5",
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "fa3verify.atlas/1"}', '{"schema": "fa3verify.known/1"}'])
def test_a_file_that_is_no_atlas_is_a_wrong_file_in_one_line(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    for each in (path, tmp_path / "absent.json"):
        code, found, told = check(each)
        assert (code, len(found), told) == (2, 1, "")
        assert str(each) in found[0]


@pytest.mark.parametrize(
    ("key", "x", "is_legal"),
    [
        ("max_error", 0.0, True),
        ("max_error", math.inf, True),
        ("max_error", math.nan, False),
        ("bias", -0.5, True),
        ("ratio_median", math.nan, True),
        ("ratio_median", -1.0, False),
        ("bit_equal", 1.5, False),
    ],
)
def test_figures_that_no_error_can_have_are_not_legal(key, x, is_legal):
    assert _is_legal(key, x) is is_legal


UNNAMED = ("packages", "kinds", "layers", "worst_ratios", "cpu_s")  # objects with any keys
DAMAGES = {
    "missing": ...,
    "null": None,
    "text": "x",
    "real": 1.5,
    "negative": -1,
    "true": True,
    "list": [[]],
    "object": {},
}
# What a row may say instead without contradicting itself, by damage; whether it is true, only a replay says. All other
# damages of all other places are refused.
SAYS_SOMETHING_ELSE = {
    "missing": {"coverage.kinds.*", "coverage.not_claimed.0", "coverage.not_tried.0", "coverage.pairs", "loss.0"}
    | {"figures.*", "worst_ratios.*"}
    | {f"tried.{name}.0" for name in ("asked", "features", "group", "head_dim", "head_dim_v", "layouts", "not_tried")}
    | {f"tried.{name}.0" for name in ("nheads", "seqlen_k", "seqlen_q", "sequences")},
    "null": {"provenance.git", "coverage.least", "coverage.pairs", "failures.case", "failures.replay", "laws.replay"}
    | {"identity.device", "identity.file", "identity.sha256", "identity.version", "loss.bias", "coverage"}
    | {"bits_lost", "failures.clause", "tried", "provenance.cpu_count"}
    | {"laws.message", "figures.*", "worst_ratios.*", "worst", "worst_ratio", "worst_ratio_lse", "worst.replay"}
    | {"worst_ratios", "failures.seen", "failures.raised", "seen.got", "seen.expected", "seen.ratio", "seen.rule"},
    "text": {"provenance.git", "provenance.platform", "profile", "description", "inconclusive", "largest", "command"}
    | {"coverage.constraint", "coverage.least", "coverage.not_claimed.0", "coverage.not_tried.0", "failures.what"}
    | {"failures.message", "failures.case", "failures.cause", "failures.clause", "families.family", "laws.law"}
    | {"laws.kind", "laws.statement", "laws.message", "identity.device", "identity.file", "identity.sha256"}
    | {"identity.version", "provenance.version", "provenance.python", "provenance.twin_hash", "worst.family"}
    | {"worst.case", "worst.replay", "failures.raised", "seen.output", "seen.rule"}
    | {"tried.asked.0", "tried.features.0", "tried.layout", "tried.layouts.0", "tried.not_tried.0"},
    "real": {"figures.*", "loss.bias", "loss.rel_rmse", "worst_ratio", "worst_ratios.*", "worst_ratio_lse", "wall_s"}
    | {"seen.ratio"},
    "negative": {"seed", "seeds.0", "coverage.pairs.feasible", "coverage.pairs.tried", "loss.bias", "loss.rows"}
    | {"loss.seqlen_k", "exit_code", "provenance.seed", "provenance.cpu_count", "search_effort", "worst_ratio"}
    | {"worst_ratios.*", "worst_ratio_lse", "wall_s"},
    "true": set(),
    "list": set(),
    "object": {"packages", "layers", "worst_ratios", "cpu_s", "failures.traceback"},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the values of an atlas, of a list those of the first; not what a kernel says of order and machine."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from () if key in ("orders", "packages") else places(item, (*path, key))


def place(path: tuple[Any, ...]) -> str:
    """A path as the table above has it: its names, without the numbers before the last."""
    names = [str(step) for number, step in enumerate(path) if isinstance(step, str) or number == len(path) - 1]
    if names[-1] not in ("family", "cases", "replay", "seeds", "largest") and names[-2:-1] == ["families"]:
        return "figures.*"
    return ".".join((*names[:-1], "*") if names[-2:-1] in (["kinds"], ["worst_ratios"]) else names)


def is_said(path: tuple[Any, ...], damage: str) -> bool:
    """Tell whether the table above has a damage of a place."""
    names = place(path)
    return any(names == known or names.endswith(f".{known}") for known in SAYS_SOMETHING_ELSE[damage])


def small(content: dict[str, Any]) -> dict[str, Any]:
    """An atlas of the kernel that fails, with one of everything, that adds up."""
    row = content["kernels"][1]
    row["families"] = row["families"][:1]
    lost = row["families"][0]["bits_lost"]
    row["bits_lost"] = {"mean": lost, "worst": lost, "worst_family": row["families"][0]["family"], "families": 1}
    row["laws"] = [law for law in row["laws"] if law["status"] == "fail"][:1]
    row["loss"] = [loss for loss in row["loss"] if loss["rel_rmse"]][:1]
    row["cases"] = int(row["families"][0]["cases"]) + row["laws"][0]["examples"]
    row["outputs"] = int(row["families"][0]["outputs"]) + row["laws"][0]["outputs"]
    for name in ("not_claimed", "not_tried"):
        row["coverage"][name] = row["coverage"][name][:1]
    kinds = row["coverage"]["kinds"]
    row["coverage"]["kinds"] = {name: kinds[name] for name in ("batch", row["coverage"]["least"])}
    failures = [found for found in content["failures"] if found["replay"]][:1]
    return content | {"kernels": [row], "failures": failures}


def is_refused(path: Path, content: dict[str, Any]) -> bool:
    path.write_text(json.dumps(content))
    try:
        return bool(mistakes(path))
    except ValueError:
        return True


def test_every_damage_is_refused_that_leaves_no_row_of_another_meaning(sent):
    """Every key of every record, missing, unknown, and with a value of each other kind."""
    path, content = sent
    whole = small(content)
    assert not is_refused(path, whole)
    passed = set()
    for at in places(whole):
        for damage, value in DAMAGES.items():
            body = deepcopy(whole)
            holder = reduce(operator.getitem, at[:-1], body)
            if value is ...:
                del holder[at[-1]]
            else:
                holder[at[-1]] = value
            says_else = is_said(at, damage) or (at[-1], damage) == ("bias", "negative")
            if body != whole and not says_else and not is_refused(path, body):
                passed.add((place(at), damage))
        if isinstance(reduce(operator.getitem, at, whole), dict) and at[-1] not in UNNAMED:
            body = deepcopy(whole)
            reduce(operator.getitem, at, body)["speed"] = 3
            if not is_refused(path, body):
                passed.add((place(at), "unknown"))
    assert not passed, "; ".join(f"{x} {y}" for x, y in sorted(passed))
