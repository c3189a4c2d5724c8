"""The table of libraries: what a campaign says about each kernel, side by side, and its accumulator loss.

A library costs its own rows only: the table is written again after each, and one that fails has its reason in it.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fa3verify.campaign import summary, verify
from fa3verify.campaign.executors import make_executor
from fa3verify.campaign.findings import clusters
from fa3verify.campaign.pool import TaskError
from fa3verify.files import json_text, write_text
from fa3verify.gpu.bench.timing import query
from fa3verify.studies import accumulator_loss
from fa3verify.text import of_error, one_line
from fa3verify.verdict import ratio_text, told

SCHEMA = "fa3verify.libraries/1"
LOSS_KEYS, LOSS_ROWS, LOSS_V_MEAN = 131072, 128, 1.0
INPUTS = {"outliers": "fa3_outliers", "activations": "activations:SmolLM2-135M-Instruct"}
FIGURES = ("rmse_seen", "rmse_unrounded", "rel_rmse_seen", "rel_rmse_unrounded")
Row = dict[str, Any]


def run(settings: verify.Settings, missing: dict[str, str], tell: Callable[[str], None]) -> list[Row]:
    """Judge the kernels of ``settings``, a library after the other, and write ``libraries.json`` and ``.md``.

    Parameters
    ----------
    settings : Settings
        ``out`` takes the table, and a folder with the report of each library.
    missing : dict
        Reasons, by name, of kernels that cannot run here: they are listed.
    tell : callable
        Gets one line per library.

    Returns
    -------
    list of dict
        A row per kernel, as in ``libraries.json``.
    """
    facts = provenance(settings)
    losses, rows = _losses(settings), [{"name": name, "error": reason} for name, reason in missing.items()]
    for library, names in groupby(settings.kernels, lambda name: name.rpartition(".")[0]):
        found = _judged(settings, library, tuple(names), losses)
        rows = [*rows, *found]
        write_text(settings.out / "libraries.json", json_text({"schema": SCHEMA, "facts": facts, "kernels": rows}))
        write_text(settings.out / "libraries.md", markdown(rows, facts))
        tell(", ".join(f"{row['name']} {row.get('verdict') or row['error']}" for row in found))
    return rows


def provenance(settings: verify.Settings) -> dict[str, Any]:
    """When, where and with what the table was made; the GPU where there is one."""
    known = summary.provenance(settings.seed)
    facts = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "profile": settings.profile}
    facts |= {name: known[name] for name in ("seed", "version", "git", "twin_hash")}
    facts |= {name: known["packages"][name] for name in ("torch", "triton")}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        facts |= {"gpu": query("name"), "driver": query("driver_version")}
    return facts


def _judged(settings: verify.Settings, library: str, names: tuple[str, ...], losses: dict[str, Any]) -> list[Row]:
    """Rows of one library; whatever it does to the campaign is the reason that it has none."""
    own = replace(settings, kernels=names, out=settings.out / library, studies=False)
    try:
        found = verify.run(own, lambda total, outcome: None)
    except Exception as error:
        return [{"name": name, "error": of_error(error), "loss": losses[name]} for name in names]
    return [row_of(kernel, found["failures"], losses[kernel["name"]]) for kernel in found["kernels"]]


def _losses(settings: verify.Settings) -> dict[str, Any]:
    """Accumulator loss of every kernel, or why there is none."""
    executor, arguments = make_executor(settings), (LOSS_V_MEAN, LOSS_KEYS, LOSS_ROWS, settings.seed)
    asked = {name: executor.submit(accumulator_loss.measure, name, *arguments) for name in settings.kernels}
    found: dict[str, Any] = {}
    for name, future in asked.items():
        try:
            (found[name],) = future.result()
        except TaskError as error:
            found[name] = {"error": one_line(str(error))}
    executor.shutdown()
    return found


def row_of(kernel: dict[str, Any], failures: Sequence[dict[str, Any]], loss: Any) -> Row:
    """What the table needs of a kernel's summary (keys: :data:`fa3verify.campaign.summary.SCHEMA_NOTES`)."""
    families = {family["family"]: family for family in kernel["families"]}
    compared = [f for f in families.values() if f["bits_differing"] is not None]
    law = next((law for law in kernel["laws"] if law["law"] == "repeated_run_is_identical"), None)
    return {
        "name": kernel["name"],
        "description": kernel["description"],
        "verdict": kernel["verdict"],
        "inconclusive": kernel["inconclusive"],
        "findings": [
            f"{told(f['what'])}: {f['message']}" + (f" ({others} more of this cause)" if others else "")
            for f, others in clusters([f for f in failures if f["kernel"] == kernel["name"]])
        ],
        "coverage": kernel["coverage"]["kinds"],
        "not_tried": kernel["coverage"]["not_tried"],
        "not_claimed": kernel["coverage"]["not_claimed"],
        "outputs": kernel["outputs"],
        "ratios": {name: family["ratio_max"] for name, family in families.items()},
        "bits_compared": sum(f["outputs"] for f in compared) if compared else None,
        "bits_differing": sum(f["bits_differing"] for f in compared) if compared else None,
        "errors": {
            what: {name: families[family][name] for name in FIGURES}
            for what, family in INPUTS.items()
            if family in families
        },
        "loss": loss,
        "repeated": law and {"status": law["status"], "examples": law["examples"], "outputs": law["outputs"]},
    }


HEADER = (
    "kernel", "verdict", "claims tried", "outputs", "largest error / bound", "bits unlike the twin's",
    "relative RMSE, outliers", "relative RMSE, activations", f"loss at {LOSS_KEYS:,} keys", "policy", "same call twice",
)  # fmt: skip


def markdown(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The table, what it means, and the findings behind every verdict that is no pass."""
    lines = ["# Libraries under verify", "", ", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += _table([_cells(row) for row in rows])
    lines += [
        "Relative RMSE is against the operands that the kernel saw, then against the inputs before rounding; each "
        "kernel",
        "takes the shapes adapted to it. Loss is the relative RMSE over long rows with V of mean 1 (gain less 1 in "
        "brackets).",
        "",
    ]
    for row in rows:
        if told_of := row.get("findings") or [row[name] for name in ("inconclusive",) if row.get(name)]:
            lines += [f"**{row['name']}**", "", *(f"- {one_line(text)}" for text in told_of), ""]
    return "\n".join(lines)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    made = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in (HEADER, *rows)]
    return [made[0], "|" + "---|" * len(HEADER), *made[1:], ""]


def _cells(row: Row) -> list[str]:
    if "error" in row:
        return [row["name"], f"not judged: {row['error']}", *("-" for _ in HEADER[2:-3]), _loss(row), "-", "-"]
    repeated, coverage = row["repeated"], row["coverage"].values()
    errors = [row["errors"].get(what) for what in INPUTS]
    policy = [name.removeprefix("policy ") for name in row["not_claimed"] if name.startswith("policy ")]
    is_compared = row["bits_compared"] is not None
    return [
        row["name"],
        row["verdict"],
        f"{sum(kind['tried'] for kind in coverage)} of {sum(kind['claimed'] for kind in coverage)}",
        f"{row['outputs']:,}",
        _ratio(row["ratios"]),
        f"{row['bits_differing']} of {row['bits_compared']:,}" if is_compared else "not compared",
        *(f"{e['rel_rmse_seen']:.2e}, {e['rel_rmse_unrounded']:.2e}" if e else "-" for e in errors),
        _loss(row),
        ", ".join(policy) or "the default",
        "not claimed" if repeated is None else f"{repeated['status']}, {repeated['outputs']:,} outputs",
    ]


def _ratio(ratios: dict[str, float]) -> str:
    """The largest of the families within the bound, then those that leave it."""
    within = max((ratio for ratio in ratios.values() if ratio <= 1), default=None)
    beyond = [f"{name} {ratio_text(ratio)}" for name, ratio in ratios.items() if not ratio <= 1]
    return "; ".join([*([ratio_text(within)] if within is not None else []), *beyond]) or "-"


def _loss(row: Row) -> str:
    loss = row.get("loss")
    if not loss:
        return "-"
    return one_line(loss["error"]) if "error" in loss else f"{loss['rel_rmse']:.2e} ({loss['bias']:+.1e})"
