"""A kernel's campaign as pytest items: one for each property and for each family of inputs.

An item runs the campaign's task of the same name, with the same seed and number of examples, and fails if the campaign
would report a finding. It runs in pytest's own process: a kernel that ends its process ends pytest, or with xdist one
of its workers. :mod:`fa3verify.pytest_plugin` decides where the items are collected.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fa3verify.campaign import findings, replay_files, summary
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.plan import JudgeTask, SearchLaw, plan
from fa3verify.campaign.run import Introduction
from fa3verify.campaign.tasks import Outcome
from fa3verify.cases.coverage import COVER
from fa3verify.known.libraries import Unavailable

MARKS = {"skips": pytest.mark.skip, "xfails": lambda reason: pytest.mark.xfail(reason=reason, strict=True)}


def name_of(task: JudgeTask | SearchLaw) -> str:
    """Return the name of a task's test, in the form that pytest gives to parametrised ones."""
    if isinstance(task, SearchLaw):
        return f"property[{task.law}]"
    return "covering_array" if task.family == COVER else f"family[{task.family}]"  # a kernel has one covering array


class Broken(Exception):
    """A task has findings; its text is shown as the failure of the test."""


class Conformance(pytest.File):
    """A conftest as a collector: the kernels whose tests belong to it."""

    def __init__(self, kernels: Sequence[str], **rest: Any) -> None:
        super().__init__(**rest)
        self.kernels = kernels

    def collect(self) -> Iterator[pytest.Collector]:
        for name in self.kernels:
            yield KernelCollector.from_parent(self, name=name)


class KernelCollector(pytest.Collector):
    """A kernel; its tests are named ``property[NAME]``, ``family[NAME]`` and ``covering_array``."""

    def collect(self) -> Sequence[pytest.Item]:
        profile = self.config.option.fa3_profile
        seed = self.config.option.fa3_seed
        try:
            introduction = introduce(self.name, profile)
        except Unavailable as error:
            pytest.skip(str(error), allow_module_level=True)
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        if introduction.failed:
            raise self.CollectError(f"{self.name}: {introduction.failed}")
        tasks = plan([introduction], profile, seed)
        items = [Judged.from_parent(self, name=name_of(task), told_by=(introduction, task)) for task in tasks]
        for kind in MARKS:
            self._mark(kind, items)
        return items

    def _mark(self, kind: str, items: Sequence[Judged]) -> None:
        """Mark the tests that a file names as skipped or expected to fail; warn of a line that names no test.

        The file is the option's, or fa3_skips.txt or fa3_xfails.txt beside the conftest, which need not exist.
        """
        option = self.config.getoption(f"--fa3-{kind}")
        path = option or self.path.with_name(f"fa3_{kind}.txt")
        if not path.exists() and not option:
            return
        for number, (pattern, reason) in _lines(path, self.CollectError):
            named = [item for item in items if pattern.fullmatch(item.name) or pattern.fullmatch(item.title)]
            for item in named:
                item.add_marker(MARKS[kind](reason=reason))
            if not named and "::" not in pattern.pattern:
                self.warn(pytest.PytestWarning(f"{path.name}:{number} names no test of {self.name}"))


def _lines(path: Path, error: type[Exception]) -> Iterator[tuple[int, tuple[re.Pattern[str], str]]]:
    """Yield number, pattern and reason of every line of a file; raise ``error`` for a line without a reason."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failed:
        raise error(f"{path} cannot be read: {failed}") from None
    for number, line in enumerate(lines, 1):
        pattern, _, reason = (part.strip() for part in line.partition("#"))
        if pattern and not reason:
            raise error(f"{path}:{number} must be PATTERN # reason, got {line!r}")
        if pattern:
            yield number, (re.compile(re.escape(pattern).replace(r"\*", ".*")), reason)


class Judged(pytest.Item):
    """One task of a campaign."""

    def __init__(self, *, told_by: tuple[Introduction, JudgeTask | SearchLaw], **rest: Any) -> None:
        super().__init__(**rest)
        self.introduction, self.task = told_by

    @property
    def title(self) -> str:
        """Return its name behind that of its kernel."""
        return f"{self.introduction.name}::{self.name}"

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.title

    def runtest(self) -> None:
        outcome = Outcome(self.task, self.task.run())
        profile = self.config.option.fa3_profile
        seed = self.config.option.fa3_seed
        body, _, found, _ = summary.of_kernel(self.introduction, [outcome], None, profile=profile, seed=seed)
        if found:
            raise Broken("\n".join(self._told(finding, number) for number, finding in enumerate(found)))
        if any(law.status == "not_tried" for law in body.laws):
            pytest.skip("nothing was tried that the kernel takes")

    def _told(self, found: findings.Finding, number: int) -> str:
        """Return a finding in words: what, the smallest case, and how to run it again; its replay file is written."""
        path = None
        if found.content:
            name = re.sub(r"[^A-Za-z0-9._+-]", "_", f"{self.title}-{number}") + ".json"
            path = _folder(self.config) / name
            rest = {"baseline": found.baseline, "traceback": found.traceback, "is_finding": True}
            replay_files.write(path, replay_files.ReplayFile(found.kernel, found.what, found.content, **rest))
        facts = findings.lines(found, path and str(path))
        return "\n  ".join([f"{found.kernel} {found.what.told}: {found.message}", *facts])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the words of a finding; any other exception is our own error, and has its traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, Broken) else super().repr_failure(excinfo, style)


def _folder(config: pytest.Config) -> Path:
    """Return where replay files go: pytest's cache, or a folder of its own where that is switched off."""
    cache = getattr(config, "cache", None)
    return cache.mkdir("fa3verify") if cache else Path(tempfile.mkdtemp(prefix="fa3verify-"))
