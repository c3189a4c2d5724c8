"""Every kernel that a page declares is called as it says, and passes or fails as the page shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa3verify.campaign.plan import judge_cases
from fa3verify.cases import space
from fa3verify.cases.dimensions import OF_CACHES
from fa3verify.known.registry import find
from fa3verify.properties import find_law, run_law
from tests.test_pages import GUIDES, relative

BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
DECLARED = re.compile(r"^@fa3verify\.kernel\(.*?^def (\w+)", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"^\s*(?:import|from) (torch|triton)\b", re.MULTILINE)
LAW = re.compile(r"FAIL.* property (\w+): ")
FEW = ("mask", "cache", "group", "sinks", "keys", *OF_CACHES)  # dimensions of which each class has a case
COSTLY = {"long", "several tiles", "5 or more"}


def kernels() -> Iterator[Any]:
    """Blocks of pages that declare a kernel: its name, its text, and the command with its output behind it."""
    for page in GUIDES:
        blocks = BLOCKS.findall(page.read_text())
        for i, (kind, text) in enumerate(blocks):
            if kind == "python" and (named := DECLARED.search(text)):
                shown = next((output for of, output in blocks[i + 1 : i + 2] if of == "console"), "")
                needs = set(NEEDS.findall(text))
                marks = [pytest.mark.optional] if needs else []
                marks += [pytest.mark.nightly] if "triton" in needs else []  # its interpreter is slow
                yield pytest.param(named[1], text, shown, id=f"{relative(page)}-{i}", marks=marks)


def test_pages_declare_kernels_in_all_their_blocks():
    """None is declared in another way, which the test below would not see."""
    blocks = [block for page in GUIDES for block in BLOCKS.findall(page.read_text())]
    declared = [text for kind, text in blocks if kind == "python" and "@fa3verify.kernel(" in text]
    assert len(declared) == len(list(kernels())) >= 13


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "text", "shown"), list(kernels()))
def test_a_kernel_of_a_page_is_judged_as_the_page_shows_it(name, text, shown, tmp_path, monkeypatch, request):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    file = "page_" + re.sub(r"\W", "_", request.node.callspec.id) + ".py"
    Path(file).write_text(text)
    kernel = find(f"{file}:{name}")
    points = [{of: c} for of, classes in space.claimed(kernel).items() if of in FEW for c in classes]
    cheap = [point for point in points if COSTLY.isdisjoint(point.values())]
    cases = [space.case_of(kernel, point, seed) for seed, point in enumerate(cheap)]
    records = judge_cases(kernel, "page", [case for case in cases if kernel.supports(case.problem)])
    assert len(records) >= 3
    wrong = [
        record.error.message if record.error else "wrong values"
        for record in records
        if record.error or record.measures["ratio_max"] > 1
    ]
    assert not [record for record in records if record.error and record.error.raised == "TypeError"]
    if law := LAW.search(shown):
        found = run_law(find_law(law[1]), kernel, max_examples=2, seed=0, shrink_seconds=0)
        wrong += [found.violation.message] if found.violation else []
    assert bool(wrong) == ("FAIL" in shown or "QUESTION" in shown), (wrong, shown)
