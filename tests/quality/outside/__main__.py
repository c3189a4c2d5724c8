"""Judge the kernels of this folder as a user would, by ``fa3verify verify --quick``, each in a process of its own.

python -m tests.quality.outside --jobs 16 --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.quality.outside.right import RIGHT
from tests.quality.outside.wrong import WRONG

REQUIRED = 0.95  # share of the wrong kernels that must be found


def judge(name: str, is_wrong: bool) -> dict[str, Any]:
    """Judge one of this folder's kernels."""
    module, (kind, words) = ("wrong", WRONG[name]) if is_wrong else ("right", ("right", RIGHT[name]))
    return judged(f"tests.quality.outside.{module}:{name}", kind, words)


def judged(reference: str, kind: str, words: str, most_seconds: float | None = None) -> dict[str, Any]:
    """Run the command and return its exit code, its verdict and what it names first; -1 where its time ran out."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--quick",
            "--workers",
            "1",
            "--out",
            folder,
            "--quiet",
            *([] if kind == "right" else ["--fail-fast"]),
        ]
        command = [sys.executable, "-m", "fa3verify", "verify", reference, *options]
        began = time.monotonic()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # so that its workers can be stopped with it
        ) as process:
            try:
                said = process.communicate(timeout=most_seconds)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()
                code = -1
        seconds = time.monotonic() - began
        summary = Path(folder) / "summary.json"
        found = json.loads(summary.read_text()) if summary.exists() else {"verdict": "no report", "failures": []}
    verdict = "time limit" if code == -1 else found["verdict"]
    first = next(iter(found["failures"]), {})
    told = {"where": first.get("what", ""), "message": str(first.get("message", ""))[:200]}
    row = {"name": reference.rpartition(":")[2], "class": kind, "words": words, "exit": code, "verdict": verdict}
    return row | told | {"seconds": round(seconds, 1), "said": said[0][-300:] + said[1][-300:]}


def is_right(row: dict[str, Any]) -> bool:
    """Tell whether a kernel was judged rightly: a wrong one is found, a right one passes."""
    return row["exit"] == (0 if row["class"] == "right" else 1)


def main(arguments: list[str] | None = None) -> int:
    """Judge all kernels, or those that match a pattern; 1 where a right one fails or too few wrong ones are found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out")
    asked = parser.parse_args(arguments)
    todo = [(name, of is WRONG) for of in (WRONG, RIGHT) for name in of if fnmatchcase(name, asked.only)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = []
        for row in pool.map(lambda each: judge(*each), todo):
            rows.append(row)
            if not is_right(row):
                told = f"{row['seconds']:6} s  {row['where']} {row['message']}"
                print(f"{row['class']:11}{row['name']:24}{row['verdict']:13}{told}", flush=True)
    wrong = [row for row in rows if row["class"] != "right"]
    right = [row for row in rows if row["class"] == "right"]
    found, passed = (sum(map(is_right, of)) for of in (wrong, right))
    print(f"{found} of {len(wrong)} wrong kernels found, {passed} of {len(right)} right ones pass")
    if asked.out:
        Path(asked.out).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(passed < len(right) or found < REQUIRED * len(wrong))


if __name__ == "__main__":
    sys.exit(main())
