"""Write stored expectations again after a change that is meant.

``python -m tests.bless`` prints what is stored, what each file holds and who has to measure again where it moves.
``python -m tests.bless NAME ...`` writes those, and ``python -m tests.bless all`` whatever takes neither Triton nor
minutes; both print which files moved. The diff is what a reviewer reads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fa3_reports import conformance
from fa3verify.files import markdown_table
from fa3verify.judging.clauses import clauses
from tests import house, pins, test_pages
from tests.harness import pinned
from tests.harness.report import stored_run
from tests.reference.bounds import corners
from tests.reports.studies import stored_records

ROOT = Path(__file__).parents[1]
CLAUSES = ROOT / "fa3verify" / "data" / "clauses.toml"
DETAILS = (ROOT / "reports" / "h200", ROOT / "reports" / "h100")


class Stored(NamedTuple):
    """Files of expectations, what they hold, and what a move of them means."""

    files: tuple[str, ...]
    holds: str
    moved: str
    renew: Callable[[], object] | None
    is_quick: bool = True


def renew_clauses() -> None:
    """Write the digests of demands, and the two pages that are made of them; versions are raised by hand."""
    text = CLAUSES.read_text(encoding="utf-8")
    found = conformance.digests()
    for clause in clauses().values():
        text = text.replace(f'digest = "{clause.digest}"', f'digest = "{found[clause.of]}"')
    CLAUSES.write_text(text, encoding="utf-8")
    _run("-m", "fa3_reports", "clauses")  # reads the table anew


def renew_audit() -> None:
    """Compile every shipped kernel, and accept what the compiler makes of it."""
    _run("-m", "fa3_reports", "audit", "--accept", "--quiet")


def renew_devices() -> None:
    """Make the pages of devices and of claims from the data that is there."""
    for folder in DETAILS:
        _run("-m", "fa3_reports", "device", str(folder))
    _run("-m", "fa3_reports", "claims", str(ROOT / "reports" / "claims.toml"))


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)


STORED = {
    "house": Stored(("tests/house.toml",), "budgets of the wheel", "they only fall", house.renew),
    "plans": Stored(
        ("tests/harness/pinned.json",),
        "digests of drawn operands, planned cases, trials, and options of the verbs",
        "users' baselines and replay files are of other inputs: say so in CHANGELOG",
        pinned.renew,
    ),
    "pins": Stored(
        ("tests/pins.json",),
        "digests of recorded and timed cases, microbenchmarks, planted faults, simulated cycles, searches",
        "what the diff names is measured again (`record`, `bench`, `mutants`), or is stale on its page",
        pins.renew,
    ),
    "corners": Stored(
        ("tests/reference/bounds/corners.json",),
        "the forward bound at corners of its domain",
        "nobody, but work one out by hand (`tests/reference/bounds/by_hand_forward.py`)",
        corners.renew,
    ),
    "clauses": Stored(
        ("fa3verify/data/clauses.toml", "docs/conformance.md", "reports/atlas/conformance.md"),
        "digests of what each clause demands, and its page",
        "raise the version of a clause that demands something else; `atlas` judges again",
        renew_clauses,
    ),
    "pages": Stored(
        ("tests/harness/report/stored_run.txt",), "what a report shows of a stored run", "nobody", stored_run.renew
    ),
    "transcripts": Stored(
        ("README.md", "docs"),
        "what the commands of the pages print",
        "nobody; where the number of lines changes, the page is edited by hand",
        test_pages.renew,
        is_quick=False,
    ),
    "studies": Stored(
        ("tests/reports/studies/stored_records.json.xz", "tests/reports/studies/stored_records.txt"),
        "records and pictures of small studies",
        "`python -m fa3_reports studies` draws the published ones again",
        stored_records.renew,
    ),
    "devices": Stored(
        ("reports/h200", "reports/h100", "reports/claims.md", "reports/claims.json"),
        "pages and tables of measured data, each with its key",
        "what is stale now is left out of the pages, which say so, until it is measured on its GPU",
        renew_devices,
        is_quick=False,
    ),
    "audit": Stored(
        ("kernels/fa3_kernels/audit/audit.json",),
        "registers, spills, instructions and launches of every shipped kernel (needs Triton; minutes)",
        "evidence on other launches is stale: `bits`, `bench`, `sanitize` on a GPU",
        renew_audit,
        is_quick=False,
    ),
    "released": Stored(
        ("tests/kernels/golden", "reports/h200/recordings", "reports/h100/recordings"),
        "what GPUs and released libraries returned",
        "measured, never written here (`python -m fa3_reports record`)",
        None,
    ),
    "replays": Stored(
        ("tests/harness/replays/expected.json",),
        "how replay files of 0.1.0 end",
        "a promise to users: it is not renewed",
        None,
    ),
}


def table() -> str:
    """Return what is stored, as a table in Markdown."""
    rows = [(name, ", ".join(each.files), each.holds, each.moved) for name, each in STORED.items()]
    return "\n".join(markdown_table(("name", "files", "holds", "if it moves"), rows))


def contents(each: Stored) -> dict[Path, bytes]:
    """Return the bytes of all files of an expectation."""
    roots = [ROOT / name for name in each.files]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*")) if path.is_file()]
    return {path: path.read_bytes() for path in paths}


def main(names: Sequence[str]) -> int:
    """Renew expectations by name, tell which files moved, and return an exit code."""
    if not names:
        print(table())
        return 0
    chosen = (
        [name for name, each in STORED.items() if each.renew and each.is_quick] if list(names) == ["all"] else names
    )
    if unknown := [name for name in chosen if name not in STORED or STORED[name].renew is None]:
        print(f"nothing is written of {', '.join(unknown)}: {', '.join(n for n, e in STORED.items() if e.renew)}, all")
        return 2
    for name in chosen:
        each = STORED[name]
        before = contents(each)
        assert each.renew
        each.renew()
        after = contents(each)
        moved = sorted(path for path in before | after if before.get(path) != after.get(path))
        told = ", ".join(str(path.relative_to(ROOT)) for path in moved)
        print(f"{name}: {f'{told}. If it moves: {each.moved}' if moved else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
