"""Judge the kernels of this folder as a user would, by ``fa3verify verify --quick``, each in a process of its own.

python -m tests.quality.calls --jobs 16 --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.quality.calls.exhibits import Exhibit
from tests.quality.calls.museum import EXHIBITS
from tests.quality.outside.__main__ import is_right, judged

REQUIRED = 0.97  # share of the wrong kernels that must be found
SECONDS = 240  # for one kernel


def judge(exhibit: Exhibit) -> dict[str, Any]:
    """Run the command and return its exit code, its verdict and what it names first."""
    return judged(exhibit.reference, exhibit.kind, exhibit.words, SECONDS)


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each class: how many of its kernels were judged rightly."""
    for kind in dict.fromkeys(row["class"] for row in rows):
        own = [row for row in rows if row["class"] == kind]
        seconds = sorted(row["seconds"] for row in own)
        done = f"{sum(map(is_right, own))} of {len(own)} {'pass' if kind == 'right' else 'found'}"
        late = sum(row["verdict"] == "time limit" for row in own)
        yield f"{kind:11}{done:20}median {seconds[len(own) // 2]} s, at most {seconds[-1]} s, {late} out of time"


def main(arguments: list[str] | None = None) -> int:
    """Judge all kernels, or those whose class or name matches a pattern.

    Returns 1 where a right one fails or too few wrong ones are found.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of classes or names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    words = {name: (name, exhibit.kind) for name, exhibit in EXHIBITS.items()}
    todo = [EXHIBITS[name] for name in words if any(fnmatchcase(x, y) for x in words[name] for y in asked.only)]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for row in pool.map(judge, todo):
            rows.append(row)
            told = f"{row['exit']:>4} {row['seconds']:6} s  {row['where']} {row['message'][:120]}"
            print(f"{'ok' if is_right(row) else 'NO':3}{row['class']:11}{row['name']:27}{told}", flush=True)
            if asked.out:  # after each, so that an interrupted run leaves what it has
                asked.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(*summary(rows), sep="\n")
    wrong = [row for row in rows if row["class"] != "right"]
    found = sum(map(is_right, wrong))
    passed = all(is_right(row) for row in rows if row["class"] == "right")
    return int(not passed or found < REQUIRED * len(wrong))


if __name__ == "__main__":
    sys.exit(main())
