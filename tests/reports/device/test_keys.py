"""Every file of evidence has a key; whoever alters a key, or the code behind it, makes the file stale by that alone."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from fa3_reports import claims, stored
from fa3_reports.device import keys, page
from fa3_reports.device.source import Source
from fa3_reports.mutation import provenance
from fa3verify import files

REPORTS = Path(__file__).parents[3] / "reports"
SUFFIXES = {".csv", ".json", ".jsonl", ".nc", ".npz", ".toml", ".xz"}
CODE = REPORTS / "fa3_reports"
FILES = [path for path in REPORTS.rglob("*") if path.suffix in SUFFIXES and not path.is_relative_to(CODE)]
# A packed table is called as it is unpacked; a recording has no other name.
PACKED = {path: path.with_suffix("") for path in FILES if path.with_suffix("").suffix in SUFFIXES - {files.PACKED}}
EVIDENCE = sorted(PACKED.get(path, path) if path.suffix == files.PACKED else path for path in FILES)
UNKEYED = (keys._constant, keys._none)
SHOWN = sorted(
    {
        (REPORTS / device / path).resolve()
        for device in ("h100", "h200")
        for path in json.loads((REPORTS / device / page.FACTS).read_text())["sources"]
    }
    | {(REPORTS / path).resolve() for path in json.loads((REPORTS / claims.FACTS).read_text())["sources"]}
)


def named(path: Path) -> str:
    return path.relative_to(REPORTS.parent).as_posix()


def test_every_file_of_evidence_has_a_key_and_every_key_a_file():
    assert len(EVIDENCE) > 300
    undeclared = [named(path) for path in EVIDENCE if keys.key_of(path) is keys.UNDECLARED]
    assert not undeclared, "declare in fa3_reports.device.keys what ties these to the code"
    used = Counter(
        pattern
        for path in {*EVIDENCE, *SHOWN}
        for key in [keys.key_of(path)]
        for pattern in key.files
        if path.match(pattern)
    )
    assert not [pattern for key in keys.KEYS for pattern in key.files if not used[pattern]]
    assert all(len(key.reason.split()) >= 3 for key in keys.KEYS)


def test_a_file_that_is_not_declared_is_stale(tmp_path):
    (tmp_path / "rumours.csv").write_text("kernel\n")
    assert "no key is declared" in keys.why_stale(Source(tmp_path), "rumours.csv")


def copied(path: Path, tmp_path: Path) -> Path:
    """Copy a file with all that lies beside it, below a folder of the same name."""
    folder = path.parent
    to = tmp_path / "reports" / folder.relative_to(REPORTS)
    for beside in [files.stored(path), *folder.glob("*_provenance.json"), *folder.glob("*_run.json")]:
        to.mkdir(parents=True, exist_ok=True)
        shutil.copy(beside, to / beside.name)
    if path.name == "compared.csv":
        for recording in folder.glob("*.xz"):
            shutil.copy(recording, to / recording.name)
    return to / path.name


def with_another_key(path: Path) -> None:
    """Alter the hash or version by which a file, or the provenance beside it, is bound to the code, and only that."""
    for file in [path, *path.parent.glob("*_provenance.json"), *path.parent.glob("host_run.json")]:
        if file.suffix not in (".csv", ".json", ".md"):
            continue
        text = files.read_text(file)
        text = re.sub(r'(launches_sha256"?[:=] ?"?)[0-9a-f]{8}', r"\g<1>00000000", text)
        text = re.sub(r'("[^"]+": ")[0-9a-f]{16}"', r'\g<1>0000000000000000"', text)  # of one launch, or function
        text = re.sub(r'("version": ")\d+\.\d+\.\d+"', r'\g<1>0.0.0"', text)
        files.write_text(file, text)
    if path.suffix == ".csv" and not path.name.endswith(".stamps.csv"):
        rows = stored.read_csv(path)
        for name in {"plan", "ptx_sha256"} & {*rows[0]}:
            rows[-1][name] = "0" * 16
            files.write_text(path, files.csv_text([*rows[0]], (row.values() for row in rows)))


KEYED = [path for path in SHOWN if keys.key_of(path).why_stale not in UNKEYED and "release" not in str(path)]


@pytest.mark.parametrize("path", KEYED, ids=named)
def test_a_file_with_another_key_is_stale_and_says_why(path, tmp_path):
    there = copied(path, tmp_path)
    with_another_key(there)
    assert keys.why_stale(Source(there.parent), there.name)


@pytest.mark.parametrize("kind", provenance.ROOTS)
def test_a_table_of_mutants_is_stale_by_any_of_its_keys_and_says_which(kind, tmp_path):
    (tmp_path / "mutants").mkdir()
    source, path = Source(tmp_path), f"mutants/{kind}.csv"
    (tmp_path / path).write_text("planted\n")
    assert "no keys were kept" in keys.why_stale(source, path)
    known = provenance.keys(kind)
    provenance.write(tmp_path / "mutants", kind, known, {"profile": "quick"})
    assert keys.why_stale(source, path) == ""
    for name in known:
        provenance.write(tmp_path / "mutants", kind, known | {name: "0" * 16}, {})
        assert keys.why_stale(source, path) == f"{name} changed since it was judged"


def test_a_release_of_another_version_is_stale(tmp_path):
    for name, is_stale in (("release-0.0.1", True), (f"release-{keys.__version__}", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.md").write_text("# A report\n")
        assert bool(keys.why_stale(Source(tmp_path), f"{name}/report.md")) == is_stale


def test_a_file_of_which_no_hash_was_kept_is_not_called_current():
    for path in ("h200/speed/unlisted/unlisted.csv", "h200/speed/packed/packed.csv", "mutants/bound_terms.csv"):
        assert "no hash" in keys.why_stale(Source(REPORTS), path)


def test_rows_of_a_bench_are_stale_by_the_run_that_they_are_of(tmp_path):
    """A run of today's launches does not make those of an older run current, nor the older run those of today stale."""
    path = REPORTS / "h200" / "speed" / "ragged" / "bench.jsonl"
    there = copied(path, tmp_path)
    assert keys.why_stale(Source(there.parent), there.name) == ""
    packed = files.stored(there)
    lines = [json.loads(line) for line in files.read_text(packed).splitlines()]
    first = next(line["run"] for line in lines if line["kind"] == "run")
    packed.unlink()
    there.write_text(
        "".join(json.dumps(line | ({"run": first} if line["kind"] == "cell" else {})) + "\n" for line in lines)
    )
    assert keys.why_stale(Source(there.parent), there.name).startswith("6 of 48 rows: ")


def test_what_is_shown_of_a_bench_is_stale_by_its_own_rows_alone(monkeypatch):
    """A change of the chained FP8 kernel says nothing of the one that ships, whose ratios stand on the first page."""
    source, path = Source(REPORTS / "h200"), "speed/paper_grid/bench.jsonl"
    both = {"gluon", "gluon.chained"}  # a chained launch has all that a plain one has
    for changed, stale in (("e4m3_d128_dense_chained", {"gluon.chained"}), ("e4m3_d128_dense", both)):
        monkeypatch.setattr(keys, "changed_since", lambda *args, changed=changed: frozenset({changed}))
        assert keys.why_stale(source, path)
        for kernel in both:
            assert keys.is_stale(source, path, lambda row, kernel=kernel: row["kernel"] == kernel) == (kernel in stale)
        assert not keys.is_stale(source, path, lambda row: row["dtype"] != "e4m3")


def test_a_row_of_the_ledger_is_current_only_where_its_twin_and_its_plan_are_todays(tmp_path):
    """All 2,662 rows were of another twin's code while the page said that 0 digests differ."""
    there = copied(REPORTS / "h100" / "recordings" / "compared.csv", tmp_path)
    head, *rows = (line.split(",") for line in there.read_text().splitlines())
    rows = [row for row in rows if row[0] == "flash3"][:4]
    for i, column in enumerate(("twin", "plan")):
        rows[i][head.index(column)] = "0" * 16
    there.write_text("\n".join(map(",".join, [head, *rows])) + "\n")
    source = Source(there.parent)
    assert keys.of_todays_twin(source, there.name) == [False, False, True, True]
    assert keys.why_stale(source, there.name).startswith("2 of 4 launches")


def test_the_committed_ledger_is_of_the_twins_as_they_are_now():
    """After an edit of their arithmetic the ledger is made again, as reports/h100/recordings/README.md says."""
    source, path = Source(REPORTS / "h100"), "recordings/compared.csv"
    stale = Counter(
        row["recording"]
        for row, is_current in zip(source.rows(path), keys.of_todays_twin(source, path), strict=True)
        if not is_current
    )
    assert not stale
    assert not keys.why_stale(source, path)


def small_page(tmp_path: Path) -> dict[str, str]:
    """The page of a folder with the ledger, the recordings and the bits of the forward."""
    for path in ("recordings/compared.csv", "bits/gluon_forward_bits.csv", "bits/gluon_forward_controls.csv"):
        folder = copied(REPORTS / "h100" / path, tmp_path).parents[1]
    by_hand, *sentences = re.split(r"^(?=\[\[)", (REPORTS / "h100" / page.HAND_WRITTEN).read_text(), flags=re.MULTILINE)
    (sentence,) = (each for each in sentences if "recorded-twins" in each)
    (folder / page.HAND_WRITTEN).write_text(f"{by_hand}conclusions = []\n{sentence}")
    return page.render(folder)


@pytest.mark.parametrize("is_stale", [True, False])
def test_a_page_leaves_out_the_ledger_of_another_twin_with_its_sentence(tmp_path, monkeypatch, is_stale):
    if is_stale:
        monkeypatch.setattr(keys.ledger, "of_today", lambda entries, given: [])
    text = small_page(tmp_path)[page.DETAILS_MARKDOWN]
    assert ("- **Released kernels beside our models of them" in text) != is_stale
    assert ("**Recordings against our twins of these libraries**" in text) != is_stale
    assert ("launches were compared with a twin or a plan that changed since" in text) == is_stale


def test_provenance_of_the_page_calls_nothing_current_that_has_no_hash():
    rows = (REPORTS / "h200" / "tables" / "provenance.csv").read_text().splitlines()
    assert not [row for row in rows if "host_run" in row and row.endswith("current")]
    assert [row for row in rows if row.endswith("current")]


def test_a_claim_that_rests_on_a_stale_file_says_so(tmp_path):
    (tmp_path / "reports" / "atlas" / "h200").mkdir(parents=True)
    stored = tmp_path / "reports" / "atlas" / "h200" / "atlas.json"
    stored.write_text(json.dumps({"version": "0.0.1", "entries": [{"kernel": "a", "name": "a", "x": 1.0}]}))
    (tmp_path / "reports" / "claims.toml").write_text(
        'title = "t"\ntext = []\n[sources]\np = "a paper"\n[[claim]]\ntopic = "x"\ntext = "y"\nsource = "p"\n'
        'said = "1"\nverdict = "confirmed"\nmeasured = "{f}"\nholds = {f = [0, 2]}\n'
        '[claim.figures.f]\nfile = "atlas/h200/atlas.json"\nkeys = ["entries", "a", "x"]\n'
    )
    assert (
        "h200/atlas.json](atlas/h200/atlas.json) (stale)"
        in claims.render(tmp_path / "reports" / "claims.toml")[claims.PAGE]
    )
