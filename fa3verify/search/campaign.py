"""The adversary as part of a campaign: whether inputs that are bred for it break the bound of our own twins."""

from __future__ import annotations

from pathlib import Path

from fa3verify.campaign.findings import finding
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.run import Finding
from fa3verify.campaign.tasks import Outcome, Task
from fa3verify.files import json_text, write_text
from fa3verify.search import adversary as run

PROBLEMS: dict[ProfileName, int] = {"soak": 200_000}  # for every dtype; the other profiles have no time for it
FILE = "adversary.json"


def tasks(kernels: tuple[str, ...], profile: ProfileName, seed: int) -> list[Task]:
    """Return the searches for the forward twins among the kernels, none where the profile has no budget."""
    dtypes = tuple(
        kernel.removeprefix("twin.") for kernel in kernels if kernel in ("twin.fp16", "twin.bf16", "twin.e4m3")
    )
    plan = run.plan(dtypes, PROBLEMS[profile], seed) if profile in PROBLEMS else []
    return [Task("adversary", f"adversary: {a['dtype']} {a['name']}", run.search_island, a) for a in plan]


def write(outcomes: list[Outcome], out: Path) -> list[Finding]:
    """Write what the searches found beside the report and return a failure for every hole and for every lost search."""
    mine = [outcome for outcome in outcomes if outcome.task.kind == "adversary"]
    done = [outcome for outcome in mine if not outcome.error and not outcome.skipped]
    if not mine:
        return []
    body = run.assembled([o.task.arguments for o in done], [o.value for o in done])
    write_text(out / FILE, json_text(body))
    failures = [("-", o.task.label, o.error) for o in mine if o.error]
    for dtype, part in body["dtypes"].items():
        for name, island in part["islands"].items():
            failures += [
                (f"twin.{dtype}", f"adversary {name}", f"error / bound {find['value']:.4g}, {cause}; see {FILE}")
                for cause, find in island["violations"].items()
            ]
    return [finding(kernel, what, text or "") for kernel, what, text in failures]
