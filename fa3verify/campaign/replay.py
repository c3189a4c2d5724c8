"""Replay files: a found case or a failed law as JSON that anyone can run again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3verify import __version__
from fa3verify.campaign.profiles import CAPTURED, PROFILES, judged_cases
from fa3verify.files import write_text
from fa3verify.text import of_error
from fa3verify.verdict import law_of

if TYPE_CHECKING:
    from fa3verify.candidates import Candidate
    from fa3verify.cases import Case
    from fa3verify.judgement import Judgement
    from fa3verify.properties import Trial

SCHEMA = "fa3verify.replay/1"
FAMILY_SCHEMA = "fa3verify.family/1"
LARGEST_SCHEMA = "fa3verify.largest/1"
HUNTED_SCHEMA = "fa3verify.hunted/1"


def write(
    path: Path,
    kernel: str,
    what: str,
    content: dict[str, Any],
    baseline: dict[str, Any] | None = None,
    sums: str | None = None,
    traceback: dict[str, str] | None = None,
) -> None:
    """Write one replay file; ``content`` is a case or a trial in JSON, ``baseline`` the stored figure that moved,
    ``sums`` what the bound of a kernel that states no order assumed of them, ``traceback`` that of what it raised."""
    body: dict[str, Any] = {"schema": SCHEMA, "version": __version__, "kernel": kernel, "what": what}
    rest = {"baseline": baseline, "sums": sums, "traceback": traceback}
    body |= {"content": content} | {name: value for name, value in rest.items() if value}
    write_text(path, json.dumps(body, indent=1) + "\n")


def of_family(cases: Iterable[Mapping[str, Any]], hypothesis: str = "") -> dict[str, Any]:
    """Return the content that judges all cases of a family again, of judged cases; the largest error comes first.

    The figures of a kernel that states no order are those under the hypothesis that its campaign chose.
    """
    judged = sorted(cases, key=lambda case: case["measures"]["ratio_max"], reverse=True)
    chosen = {"hypothesis": hypothesis} if hypothesis else {}
    return {"schema": FAMILY_SCHEMA, **chosen, "cases": [case["case"] for case in judged]}


def write_largest(path: Path, kernel: str, cases: Mapping[str, Any], hypothesis: str = "") -> None:
    """Write the largest case of every family of a kernel, by family, as one replay file on one line a family."""
    chosen = {"hypothesis": hypothesis} if hypothesis else {}
    content = {"schema": LARGEST_SCHEMA, **chosen, "cases": {}}
    named = {"schema": SCHEMA, "version": __version__, "kernel": kernel, "what": "largest error / bound"}
    empty = json.dumps(named | {"content": content})
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(case, sort_keys=True)}" for name, case in cases.items())
    write_text(path, empty[: empty.rindex("{") + 1] + f"\n{rows}\n}}}}}}\n")


def chosen_of(kernel: Mapping[str, Any]) -> str:
    """Return the hypothesis under which the figures of a summary's kernel are, empty where it states its order."""
    return kernel.get("assumed", {"chosen": ""})["chosen"]


def write_all(summary: dict[str, Any], out: Path) -> None:
    """Turn the replay contents of a summary into files below OUT/worst and leave their paths in it."""
    worst = out / "worst"
    for old in worst.glob("*.json"):
        old.unlink()

    sums = {kernel["name"]: kernel["assumed"]["sums"] for kernel in summary["kernels"] if "assumed" in kernel}
    stored: dict[str, str] = {}  # content -> path: one file per case, however many rules it breaks

    def store(
        stem: str, kernel: str, what: str, content: dict[str, Any] | None, **rest: dict[str, Any] | None
    ) -> str | None:
        if content is None:
            return None
        key = json.dumps([content, rest.get("baseline")], sort_keys=True)
        if key not in stored:
            name = re.sub(r"[^A-Za-z0-9._+-]", "_", stem)[:100]
            while f"worst/{name}.json" in stored.values():
                name += "_"
            path = worst / f"{name}.json"
            write(path, kernel, what, content, sums=sums.get(kernel), **rest)
            stored[key] = f"worst/{path.name}"
        return stored[key]

    for number, failure in enumerate(summary["failures"]):
        stem = f"fail-{number:03d}-{failure['kernel']}-{failure['what'].split()[0]}"
        rest = {name: failure[name] for name in ("baseline", "traceback")}
        failure["replay"] = store(stem, failure["kernel"], failure["what"], failure["replay"], **rest)
    judged: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in summary["cases"]:
        judged.setdefault((case["kernel"], case["family"]), []).append(case)
    for kernel in summary["kernels"]:
        for family in kernel["families"]:
            name = family["family"]
            content = of_family(judged[kernel["name"], name], chosen_of(kernel))
            family["replay"] = store(f"family-{kernel['name']}-{name}", kernel["name"], f"family {name}", content)
        if kernel["worst"]:
            name = kernel["name"]
            kernel["worst"]["replay"] = store(f"worst-{name}", name, "largest error / bound", kernel["worst"]["replay"])
        for row in kernel.get("assumed", {"hypotheses": []})["hypotheses"]:
            if by := row["refuted_by"]:
                by["replay"] = store(
                    f"refutes-{kernel['name']}-{row['name']}", kernel["name"], by["what"], by["replay"]
                )
        for law in kernel["laws"]:
            trial = law.pop("trial", None)
            law["replay"] = store(f"law-{kernel['name']}-{law['law']}", kernel["name"], f"law {law['law']}", trial)


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


def run(
    body: dict[str, Any], kernel: str | None = None, activations: Path | None = None, family: str | None = None
) -> tuple[bool, str, dict[str, float] | None]:
    """Run a replay file's content again.

    Parameters
    ----------
    kernel : str, optional
        Another one than the file names.
    activations : Path, optional
        Folder of a user's own activations, if they are not where they were; their content must be the same.
    family : str, optional
        Of a file with the largest case of every family, the only one to run; ValueError if it has none such.

    Returns
    -------
    holds : bool
        False if the kernel still breaks the bound or the law, or if the figure is still beyond the baseline's margin.
    message : str
        One line, and behind it the traceback of what the kernel raises, if it raises.
    measures : dict, optional
        Figures of a judged case.
    """
    from fa3verify import candidates, hypotheses

    candidate = candidates.find(kernel or body["kernel"])
    holds, message, measures = _judged(candidate, body, activations, family)
    assumed = str(hypotheses.sums_of(candidate)) if hypotheses.under(candidate) else "what its order says"
    if body.get("sums", assumed) != assumed:
        message += f"; the file's bound assumed {body['sums']}, here it is {assumed}"
    return holds, message, measures


def _judged(
    candidate: Candidate, body: dict[str, Any], activations: Path | None, family: str | None
) -> tuple[bool, str, dict[str, float] | None]:
    """What :func:`run` returns, by the kind of the content."""
    from fa3verify.calls import CandidateError
    from fa3verify.campaign import settled
    from fa3verify.judgement import judge, passes
    from fa3verify.properties import find_law, replay_trial

    content = body["content"]
    if content.get("schema") == settled.SCHEMA:
        return _refutations(candidate, content, activations)
    if law := law_of(body["what"]):
        trial = _trial(content, activations)
        violation = replay_trial(find_law(law).name, candidate, trial)
        if violation is None:
            return True, f"{law} holds for {trial.case.describe()}", None
        return False, _raised(violation.message, violation.traceback), None
    if content.get("schema") == HUNTED_SCHEMA:
        from fa3verify.hunt.run import replay_content

        return replay_content(candidate, content)
    if content.get("schema") == LARGEST_SCHEMA:
        cases = _of_largest(content, family)
        return _family(candidate, body["what"], content | {"cases": cases}, activations)
    if family is not None:
        raise ValueError("the replay file is not one of the largest case of every family")
    if content.get("schema") == FAMILY_SCHEMA:
        return _family(candidate, body["what"], content, activations)
    case = _case(candidate, content, activations)
    if "baseline" in body:
        return _against_baseline(candidate, body["baseline"], case)
    try:
        judged = judge(candidate, case)
    except CandidateError as error:
        return False, _raised(f"{case.describe()}: {error}", error.traceback), None
    measures, message = judged.measures, case.describe() + _assumed(candidate, judged)
    if body["what"].startswith("L2"):
        message += "; only its bound is judged here: the file does not say which figure moved"
    return passes(candidate, measures), message, measures


def _trial(content: Any, activations: Path | None) -> Trial:
    from fa3verify.properties import Trial

    trial = Trial.from_json(content)
    return replace(trial, case=_found(trial.case, activations))


def _assumed(candidate: Candidate, judged: Judgement) -> str:
    """What the bound of a case assumed of a kernel that states no order, and which hypotheses the case leaves."""
    from fa3verify import hypotheses, operations

    if not judged.hypotheses:
        return ""
    operation = operations.find(candidate.operation)
    ratios = {name: hypotheses.strain(operation, x) for name, x in judged.hypotheses.items()}
    return f"; assumed: any order, {hypotheses.sums_of(candidate)}; this case leaves {hypotheses.holding(ratios)}"


def _refutations(
    candidate: Candidate, content: dict[str, Any], activations: Path | None
) -> tuple[bool, str, dict[str, float] | None]:
    """Judge what refutes different hypotheses about one kernel again, all of it together."""
    from fa3verify.campaign.refutations import judge_together
    from fa3verify.properties.law import SCHEMA as TRIAL

    contents = content.get("contents")
    if not isinstance(contents, list) or not all(isinstance(each, dict) for each in contents):
        raise ValueError("the replay file is damaged: it names nothing that refutes a hypothesis")
    cases = [_case(candidate, each, activations) for each in contents if each.get("schema") != TRIAL]
    trials = [_trial(each, activations) for each in contents if each.get("schema") == TRIAL]
    return (*judge_together(candidate, cases, trials), None)


def _raised(message: str, traceback: Mapping[str, str] | None) -> str:
    """A message with the traceback of what the kernel raised."""
    return f"{message}\n{traceback['text']}" if traceback else message


def _case(candidate: Candidate, content: Any, activations: Path | None) -> Case:
    """Read a case; ValueError if it is not one for this kernel."""
    from fa3verify.cases import Case

    case = _found(Case.from_json(content), activations)
    if case.operation != candidate.operation:
        raise ValueError(f"the case is for operation {case.operation}, {candidate.name} computes {candidate.operation}")
    return case


def _of_largest(content: dict[str, Any], family: str | None) -> list[Any]:
    """The largest cases of all families, or of one; ValueError if there is none such."""
    cases = content.get("cases")
    if not isinstance(cases, dict):
        raise ValueError("the replay file is damaged: it names no case of its families")
    if family is not None and family not in cases:
        raise ValueError(f"the replay file has no family {family!r}; it has {', '.join(cases)}")
    return list(cases.values()) if family is None else [cases[family]]


def _family(
    candidate: Candidate, what: str, content: dict[str, Any], activations: Path | None
) -> tuple[bool, str, dict[str, float] | None]:
    """Judge all cases of a family again; the figures are those of the whole family."""
    from fa3verify import hypotheses, operations
    from fa3verify.campaign import settled
    from fa3verify.campaign.tasks import judge_cases, pooled
    from fa3verify.judgement import passes

    if not isinstance(content.get("cases"), list) or not content["cases"]:
        raise ValueError("the replay file is damaged: it names no case of its family")
    candidate = hypotheses.under(candidate).get(content.get("hypothesis", ""), candidate)
    records = judge_cases(candidate, what, [_case(candidate, case, activations) for case in content["cases"]])
    if lost := [record for record in records if "error" in record]:
        return False, _raised(f"{lost[0]['describe']}: {lost[0]['error']}", lost[0]["traceback"]), None
    records = settled.of_one_hypothesis(operations.find(candidate.operation), records)
    holds = all(passes(candidate, record["measures"]) for record in records)
    message = f"{len(records)} cases, of which the first had the largest error: {records[0]['describe']}"
    return holds, message, pooled(records, operations.find(candidate.operation))


def _found(case: Case, activations: Path | None) -> Case:
    """The case with a user's own activations in another folder, if one is named."""
    if activations is None or case.recipe.distribution != CAPTURED:
        return case
    settings = case.recipe.settings
    moved = settings | {"file": str(activations / Path(str(settings["file"])).name)}
    return replace(case, recipe=replace(case.recipe, params=moved))


def _against_baseline(candidate: Candidate, stored: Any, case: Case) -> tuple[bool, str, dict[str, float] | None]:
    """Judge the whole family of a case again and compare the figure that had moved with its limit."""
    from fa3verify import gate, operations
    from fa3verify.campaign import settled
    from fa3verify.campaign.tasks import judge_cases, pooled

    try:
        family, measure, limit = str(stored["family"]), str(stored["measure"]), float(stored["limit"])
        profile, seed = PROFILES[stored["profile"]], int(stored["seed"])
        is_own = family.startswith(f"{CAPTURED}:")  # whose only case this is
        cases = [case] if is_own else judged_cases(candidate, family, profile, seed)
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise ValueError(f"the replay file names no figure of a baseline: {of_error(error)}") from None
    records = judge_cases(candidate, family, cases)
    if lost := [record for record in records if "error" in record]:
        return False, _raised(f"{lost[0]['describe']}: {lost[0]['error']}", lost[0]["traceback"]), None
    if not records:
        raise ValueError(f"{candidate.name} takes no case of family {family}")
    operation = operations.find(candidate.operation)
    records = settled.of_one_hypothesis(operation, records)
    figures = gate.gated_figures({"operation": operation.name}, pooled(records, operation))
    if measure not in figures:
        raise ValueError(f"the replay file names no figure of a baseline: unknown measure {measure!r}")
    observed, before = figures[measure], stored.get("baseline")
    message = f"family {family}: {measure} {observed:.4g}, limit {limit:.4g}, baseline {before}"
    return math.isfinite(observed) and observed <= limit, message, figures
