"""Replay files: a found case or a failed law as JSON that anyone can run again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fa3verify import __version__
from fa3verify.files import read_text, write_text

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
        body = json.loads(read_text(path))
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
