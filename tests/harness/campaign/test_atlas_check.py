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

from fa3verify.campaign import atlas, atlas_check
from fa3verify.cli.main import main
from fa3verify.files import read_text

PUBLISHED = [path.parent / atlas.FILE for path in sorted((Path(__file__).parents[3] / "reports/atlas").glob("*/*.xz"))]
KERNELS = {"pass": "gluon.fp16", "fail": "flash3.dew.fp16"}


def check(path: Path) -> tuple[int, list[str], str]:
    done = CliRunner().invoke(main, ["atlas", "--check", str(path)])
    return done.exit_code, done.stderr.splitlines(), done.stdout


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_published_atlases_are_fine(path):
    code, mistakes, told = check(path)
    assert (code, mistakes) == (0, [])
    assert told.startswith(f"{path}: its form is right")


@pytest.fixture
def sent(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """An atlas of a kernel that passes and one that fails, with the replay files that it names."""
    content = json.loads(read_text(PUBLISHED[1]))
    content["entries"] = [next(e for e in content["entries"] if e["kernel"] == name) for name in KERNELS.values()]
    for entry in content["entries"]:
        for row in (*entry["families"], *entry["properties"], *entry["findings"]):
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
    return entry["families"][number]["figures"]


Damage = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], Any]
MUTILATED: dict[str, tuple[Damage, str]] = {
    "a count that does not add up": (
        lambda body, good, bad: good["effort"].update(problems=1000),
        ", the sum of its parts, got 1000",
    ),
    "a pass with a finding": (
        lambda body, good, bad: good.update(findings=bad["findings"][:1]),
        "entries[0].verdict: expected no finding, and enough of what it claims tried, where it is 'pass', got 'law",
    ),
    "a pass whose findings were taken out": (
        lambda body, good, bad: bad.update(verdict="pass", findings=[]),
        "entries[1].verdict: expected no finding, and enough of what it claims tried, where it is 'pass'",
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
        "entries[0].verdict: expected no finding, and enough of what it claims tried, where it is 'pass', got 'no "
        "finding, 33% tried'",
    ),
    "no verdict and no reason": (
        lambda body, good, bad: good.update(verdict="inconclusive"),
        "entries[0].verdict: expected no finding, and a reason, where it is 'inconclusive'",
    ),
    "judged, but said not to be run": (
        lambda body, good, bad: good.update(verdict="not run", reason="no GPU"),
        "entries[0].verdict: expected nothing judged, and a reason, where it is 'not run'",
    ),
    "no entry": (lambda body, good, bad: body.update(entries=[]), "entries: expected at least one, got 0"),
    "no name": (lambda body, good, bad: good.update(kernel=" "), "entries[0].kernel: expected a name, got ' '"),
    "an operation that nobody knows": (
        lambda body, good, bad: bad.update(operation="sideways"),
        "entries[1].operation: expected one of forward, quantize, backward, got 'sideways'",
    ),
    "a family without a problem": (
        lambda body, good, bad: good["families"][0].update(problems=0),
        "entries[0].families[0].problems: expected at least 1, got 0",
    ),
    "a replay file that is reached from outside": (
        lambda body, good, bad: good["families"][0].update(replay="../worst/gluon.fp16.json"),
        "entries[0].families[0].replay: expected a file below the folder of the atlas",
    ),
    "a fail without a finding": (
        lambda body, good, bad: good.update(verdict="fail"),
        "entries[0].verdict: expected at least one finding, where it is 'fail', got 'no finding, 100% tried'",
    ),
    "a negative error": (
        lambda body, good, bad: figures(good).update(max_error=-0.5, rmse_seen=None),
        "entries[0].families[0].figures.max_error: expected 0 or more, a share at most 1, got -0.5",
    ),
    "no version": (
        lambda body, good, bad: body.update(version=""),
        "version: expected that of fa3verify, as 0.2.0, got ''",
    ),
    "a key that is missing": (lambda body, good, bad: good.pop("policy"), "entries[0]: 'policy' is missing"),
    "a key that nobody knows": (lambda body, good, bad: good.update(speed=1), "entries[0]: unknown key 'speed'"),
    "a number as a text": (
        lambda body, good, bad: good["effort"].update(outputs="many"),
        "entries[0].effort.outputs: must be int, got 'many'",
    ),
    "a verdict of one's own": (
        lambda body, good, bad: good.update(verdict="fine"),
        "entries[0].verdict: fine not in literal",
    ),
    "a kernel of no dtype": (
        lambda body, good, bad: good.update(dtype=None),
        "entries[0].dtype: expected that of a kernel that was judged, got None",
    ),
    "a misspelt figure": (
        lambda body, good, bad: figures(good).update(ratio_lse_maximum=figures(good).pop("ratio_lse_max")),
        "entries[0].families[0].figures.ratio_lse_maximum: expected a figure of this operation",
    ),
    "a figure left out": (
        lambda body, good, bad: figures(bad, 3).pop("ratio_max"),
        "entries[1].families[3].figures.ratio_max: expected a number, got None",
    ),
    "a mean above its maximum": (
        lambda body, good, bad: figures(good).update(rmse_seen=10.0),
        "entries[0].families[0].figures.rmse_seen: expected at most max_error, got 10.0",
    ),
    "one kernel twice": (
        lambda body, good, bad: bad.update(kernel=good["kernel"]),
        "entries: expected every kernel once, got ['gluon.fp16']",
    ),
    "a family twice": (
        lambda body, good, bad: good["families"][1].update(family="normal"),
        "entries[0].families: expected every family and property once, got [('normal', 2)]",
    ),
    "coverage that its counts do not give": (
        lambda body, good, bad: good["coverage"]["kinds"]["batch"].update(tried=1),
        "entries[0].coverage.share: expected the least share of its kinds, got 1.0",
    ),
    "a bar that was lowered": (
        lambda body, good, bad: good["coverage"].update(required=0.0),
        "entries[0].coverage.required: expected 0.75, got 0.0",
    ),
    "more tried than claimed": (
        lambda body, good, bad: good["coverage"]["kinds"]["batch"].update(tried=4),
        "entries[0].coverage.kinds.batch.tried: expected 0 to 3, got 4",
    ),
    "a replay file that was not sent": (
        lambda body, good, bad: good["families"][0].update(replay="worst/other.json"),
        "entries[0].families[0].replay: expected a file below the folder of the atlas, got 'worst/other.json'",
    ),
    "a replay file elsewhere": (
        lambda body, good, bad: good["families"][0].update(replay="/etc/passwd"),
        "entries[0].families[0].replay: expected a file below the folder of the atlas, got '/etc/passwd'",
    ),
    "a loss without figure and reason": (
        lambda body, good, bad: good["loss"][0].update(rel_rmse=None),
        "entries[0].loss[0].rel_rmse: expected a figure of 0 or more, or else a reason in missing, got None",
    ),
}


@pytest.mark.parametrize("name", MUTILATED)
def test_every_mistake_has_a_line_that_says_what_and_where(sent, name):
    path, content = sent
    damage, expected = MUTILATED[name]
    damage(content, *content["entries"])
    path.write_text(json.dumps(content))
    code, mistakes, told = check(path)
    assert (code, told) == (2, "")
    assert any(line.startswith(f"{path}: ") and expected in line for line in mistakes), mistakes
    assert len(mistakes) <= 3, mistakes  # and nothing that is right is called wrong


def test_all_mistakes_are_named_and_not_only_the_first(sent):
    path, content = sent
    good, bad = content["entries"]
    good["effort"]["outputs"] = None
    bad["families"][2]["problems"] = 1.5
    path.write_text(json.dumps(content))
    assert atlas_check.mistakes(path) == [
        "entries[0].effort.outputs: must be int, got None",
        "entries[1].families[2].problems: must be int, got 1.5",
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "fa3verify.atlas/1"}', '{"schema": "fa3verify.known/1"}'])
def test_a_file_that_is_no_atlas_is_a_wrong_file_in_one_line(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    for each in (path, tmp_path / "absent.json"):
        code, mistakes, told = check(each)
        assert (code, len(mistakes), told) == (2, 1, "")
        assert str(each) in mistakes[0]


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
    assert atlas_check._is_legal(key, x) is is_legal


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
# damages of all other places are refused, whatever the records of an atlas are.
SAYS_SOMETHING_ELSE = {
    "missing": {"entries.0", "coverage.kinds.*", "coverage.not_claimed.0", "coverage.not_tried.0", "coverage.pairs"}
    | {"seeds.0", "loss.0", "findings.0", "figures.*"},
    "null": {"git", "coverage.least", "coverage.pairs", "findings.case", "findings.replay", "properties.replay"}
    | {"identity.device", "identity.file", "identity.sha256", "identity.version", "loss.bias", "coverage"}
    | {"properties.message", "figures.*"},
    "text": {"git", "platform", "profile", "description", "kernel", "reason", "largest", "families.family"}
    | {"coverage.constraint", "coverage.least", "coverage.not_claimed.0", "coverage.not_tried.0", "findings.what"}
    | {"findings.message", "findings.case", "findings.cause", "properties.name", "properties.kind", "properties.status"}
    | {"properties.message", "identity.device", "identity.file", "identity.sha256", "identity.version"},
    "real": {"figures.*", "loss.bias", "loss.rel_rmse"},
    "negative": {"seed", "seeds.0", "coverage.pairs.feasible", "coverage.pairs.tried", "loss.bias", "loss.rows"}
    | {"loss.seqlen_k"},
    "true": set(),
    "list": set(),
    "object": {"packages", "coverage"},
    "unknown": set(),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the values of an atlas, of a list those of the first; not what a kernel says of its order and machine."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from () if key in ("orders", "packages") else places(item, (*path, key))


def place(path: tuple[Any, ...]) -> str:
    """A path as the table above has it: the last two or three names, without the numbers before them."""
    kinds = {"kinds": "coverage.kinds.*", "figures": "figures.*"}
    if len(path) > 1 and path[-2] in kinds:
        return kinds[path[-2]]
    names = [str(step) for number, step in enumerate(path) if isinstance(step, str) or number == len(path) - 1]
    return ".".join(names)


def is_said(path: tuple[Any, ...], damage: str) -> bool:
    """Tell whether the table above has a damage of a place."""
    names = place(path)
    return any(names == known or names.endswith(f".{known}") for known in SAYS_SOMETHING_ELSE[damage])


def small(content: dict[str, Any]) -> dict[str, Any]:
    """An atlas of the kernel that fails, with one of everything, that adds up."""
    row = content["entries"][1]
    row["families"] = row["families"][:1]
    row["properties"] = [law for law in row["properties"] if law["status"] == "fail"][:1]
    row["findings"] = [found for found in row["findings"] if found["replay"]][:1]
    row["loss"] = [loss for loss in row["loss"] if loss["rel_rmse"]][:1]
    row["effort"]["problems"] = row["families"][0]["problems"] + row["properties"][0]["problems"]
    row["effort"]["outputs"] = int(row["families"][0]["figures"]["outputs"]) + row["properties"][0]["outputs"]
    for name in ("not_claimed", "not_tried"):
        row["coverage"][name] = row["coverage"][name][:1]
    kinds = row["coverage"]["kinds"]
    row["coverage"]["kinds"] = {name: kinds[name] for name in ("batch", row["coverage"]["least"])}
    return content | {"entries": [row]}


def is_refused(path: Path, content: dict[str, Any]) -> bool:
    path.write_text(json.dumps(content))
    try:
        return bool(atlas_check.mistakes(path))
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
        if isinstance(reduce(operator.getitem, at, whole), dict) and at[-1] not in ("packages", "figures", "kinds"):
            body = deepcopy(whole)
            reduce(operator.getitem, at, body)["speed"] = 3
            if not is_refused(path, body):
                passed.add((place(at), "unknown"))
    assert not passed
