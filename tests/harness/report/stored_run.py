"""The pages and the text of a stored run, whole: what users read of two kernels, one of them wrong.

    python -m tests.bless pages

writes them again after a change that is meant; the diff says what users will read. ``stored_run.json.xz`` is the
summary of a part of a campaign on a numpy kernel, which leaves out the last of more than 128 keys, and on a twin.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fa3verify.campaign.junit import junit
from fa3verify.campaign.run import Run, parse
from fa3verify.cli import console
from fa3verify.report import build

STORED = Path(__file__).with_suffix(".json.xz")
TEXT = Path(__file__).with_suffix(".txt")
FROM_MATPLOTLIB = re.compile(r"<svg [^>]*>(?:(?!</svg>).)*id=\"f-(?:(?!</svg>).)*</svg>", re.DOTALL)  # has versions
LOST = {"mean": 0.141, "worst": 0.41, "worst_family": "peaky", "families": 3}


def summary() -> dict[str, Any]:
    """Return the stored summary."""
    return json.loads(lzma.decompress(STORED.read_bytes()))


def passed() -> dict[str, Any]:
    """Return the summary as of a whole campaign on the twin alone that found nothing, with made-up counts of pairs."""
    made = summary()
    kernel = made["kernels"][1]
    by = [
        {"dimensions": ["keys", "mask"], "tried": 40, "feasible": 54},
        {"dimensions": ["batch", "keys"], "tried": 27, "feasible": 27},
    ]
    kernel["coverage"] |= {"pairs": {"by_dimensions": by, "tried": 67, "feasible": 81}}
    kernel |= {"inconclusive": "", "bits_lost": LOST, "verdict": "pass"}
    for family, bits in zip(kernel["families"], (0.25, "Infinity", -0.01), strict=True):
        family["bits_lost"] = bits
    gate = [rule | {"status": "pass"} for rule in made["gate"] if rule["kernel"] == kernel["name"]]
    layers = {"L0": "pass", "L1": "pass", "L2": "not compared", "laws": "pass"}
    told = {"verdict": "pass", "exit_code": 0, "layers": layers, "gate": gate, "failures": []}
    return made | told | {"kernels": [kernel], "wall_s": 119.6}


def texts(made: Run) -> str:
    """Return what is printed, the Markdown, and a digest of every section of the page."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        console.print_run(made, Path("out"), quiet=False)
    pages = build.render(made, "ab" * 32)
    page = FROM_MATPLOTLIB.sub("", pages[build.PAGE].partition("</style>")[2])
    sections = re.split(r"(?=<section|<h2|<h3|<figure|<details)", page)
    parts = {
        "printed": printed.getvalue(),
        build.MARKDOWN: pages[build.MARKDOWN],
        "junit.xml": junit(made).replace(" />", "/>").replace("><", ">\n<"),
        build.PAGE: "\n".join(f"{_name(each)} {_digest(each)}" for each in sections),
    }
    return "\n".join(f"==== {name}\n{_without_ends(text)}" for name, text in parts.items())


def both() -> str:
    """Return the texts of the run as it was, and of one that passed."""
    return texts(parse(summary(), "summary")) + texts(parse(passed(), "summary"))


def _name(section: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", section).split())[:40]


def _digest(section: str) -> str:
    return hashlib.sha256(section.encode()).hexdigest()[:12]


def _without_ends(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def renew() -> None:
    """Write the texts again."""
    TEXT.write_text(both(), encoding="utf-8")
