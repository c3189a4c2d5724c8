"""Replay files: a found case or a failed law as JSON that anyone can run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fa3verify import __version__
from fa3verify.files import write_text

SCHEMA = "fa3verify.replay/1"


def write(path: Path, kernel: str, what: str, content: dict[str, Any]) -> None:
    """Write one replay file; ``content`` is a case or a trial in JSON."""
    body = {"schema": SCHEMA, "version": __version__, "kernel": kernel, "what": what, "content": content}
    write_text(path, json.dumps(body, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a replay file; ValueError names what is wrong with a damaged or foreign one."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a replay file: {error}") from None
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        found = body.get("schema") if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"{path} is not a replay file: expected schema {SCHEMA!r}, got {found!r}")
    if not all(isinstance(body.get(key), str) for key in ("kernel", "what")) or not isinstance(
        body.get("content"), dict
    ):
        raise ValueError(f"{path} is a damaged replay file: kernel, what or content is missing")
    return body


def run(body: dict[str, Any], kernel: str | None = None) -> tuple[bool, str, dict[str, float] | None]:
    """Run a replay file's content again.

    Returns
    -------
    holds : bool
        False if the kernel still breaks the bound or the law.
    message : str
        One line.
    measures : dict, optional
        Figures of a judged case.
    """
    from fa3verify import candidates
    from fa3verify.calls import CandidateError
    from fa3verify.cases import Case
    from fa3verify.judgement import judge, passes
    from fa3verify.properties import Trial, find_law, replay_trial

    candidate = candidates.find(kernel or body["kernel"])
    content = body["content"]
    if body["what"].startswith("law "):
        law = find_law(body["what"].removeprefix("law "))
        trial = Trial.from_json(content)
        violation = replay_trial(law.name, candidate, trial)
        return (
            violation is None,
            violation.message if violation else f"{law.name} holds for {trial.case.describe()}",
            None,
        )
    case = Case.from_json(content)
    if case.operation != candidate.operation:
        raise ValueError(f"the case is for operation {case.operation}, {candidate.name} computes {candidate.operation}")
    try:
        measures = judge(candidate, case).measures
    except CandidateError as error:
        return False, f"{case.describe()}: {error}", None
    if body["what"].startswith("L2"):
        message = f"{case.describe()}; only its bound is judged here: verify compares a whole family with the baseline"
        return passes(candidate, measures), message, measures
    return passes(candidate, measures), case.describe(), measures
