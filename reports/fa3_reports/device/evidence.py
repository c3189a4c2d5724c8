"""Bits, recordings, accuracy, mutants and the sanitizer: what says that results are right."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fa3_reports.device.blocks import Section, whole
from fa3_reports.device.kernels import look
from fa3_reports.device.keys import of_todays_twin
from fa3_reports.device.source import Row, Source
from fa3verify.report.tables import PageColumn, PageTable, percent

FORWARD_BITS = "bits/gluon_forward_bits.csv"
BACKWARD_BITS = "bits/gluon_backward_bits.csv"
PAGED_BITS = "bits/gluon_paged_bits.csv"
CONTROLS = {"bits/gluon_forward_controls.csv": "", "bits/gluon_paged_controls.csv": " of launches over caches"}
MUTANTS = "../mutants"
FINDERS = ("crash", "properties", "bound", "baseline")  # of an edit, without bits


def total(rows: Iterable[Row], column: str) -> int:
    return sum(int(row[column]) for row in rows)


def bits(source: Source) -> Section:
    """Our kernels against their twins, planted faults, and what released kernels returned."""
    blocks: list[Any] = []
    if source.has(FORWARD_BITS):
        blocks.append(_bits(source, FORWARD_BITS, "forward", ("values", "lse")))
    if source.has(BACKWARD_BITS):
        blocks.append(_bits(source, BACKWARD_BITS, "backward", ("dq", "dk", "dv")))
    if source.has(PAGED_BITS):
        blocks.append(_bits(source, PAGED_BITS, "forward over caches", ("values", "lse")))
    blocks += _quantiser_bits(source) + _controls(source) + _recordings(source)
    text = [
        "Every output of a launch is compared with a CPU twin that computes the same bits without a GPU: "
        "tensor-core accumulation, special functions and conversions are modelled bit for bit."
    ]
    return Section("bits", "Bits", text, blocks)


def _bits(source: Source, path: str, what: str, outputs: tuple[str, ...]) -> PageTable:
    rows = source.rows(path)
    found = []
    for dtype in in_order_of(r["dtype"] for r in rows):
        for feature in (*in_order_of(r["feature"] for r in rows if r["dtype"] == dtype), "all"):
            of = [r for r in rows if r["dtype"] == dtype and feature in ("all", r["feature"])]
            sums = {name: total(of, name) for name in outputs}
            differing = sum(total(of, f"{name}_differing") for name in outputs)
            found.append({"dtype": dtype, "feature": feature, "cases": len(of)} | sums | {"differing": differing})
    columns = [PageColumn("dtype", "dtype"), PageColumn("feature", "feature"), PageColumn("cases", "cases", whole)]
    columns += [PageColumn("outputs" if name == "values" else name, name, whole) for name in outputs]
    columns += [PageColumn("differing", "differing", whole)]
    return PageTable(
        f"bits-{what.replace(' ', '-')}",
        f"{what.capitalize()} against the twin{_elsewhere(source, path)}",
        columns,
        found,
        (path,),
        fold=len(found) > 12,
    )


def _elsewhere(source: Source, path: str) -> str:
    """Say of a campaign that some of its launches, kept of an earlier one, ran on another GPU."""
    provenance = source.provenance_of(path)
    facts = source.json(provenance) if provenance else {}
    others = in_order_of(run["gpu"] for run in facts.get("kept", ()) if run["gpu"] != facts["gpu"])
    return f", some launches on an {' and an '.join(others)}" if others else ""


def in_order_of(values: Iterable[str]) -> list[str]:
    """Return each value once, where it came first."""
    return list(dict.fromkeys(values))


def _quantiser_bits(source: Source) -> list[PageTable]:
    path = "quantiser/quantize_bits.csv"
    if not source.has(path):
        return []
    rows = source.rows(path)
    found = [
        {"dtype": dtype, "cases": len(of), "codes": total(of, "values"), "floats": total(of, "floats")}
        | {"differing": total(of, "values_differing") + total(of, "floats_differing")}
        for dtype in in_order_of(r["dtype"] for r in rows)
        for of in ([r for r in rows if r["dtype"] == dtype],)
    ]
    columns = (
        PageColumn("input", "dtype"),
        PageColumn("cases", "cases", whole),
        PageColumn("codes", "codes", whole),
        PageColumn("descales and means", "floats", whole),
        PageColumn("differing", "differing", whole),
    )
    return [PageTable("bits-quantiser", "Quantiser against the twin", columns, found, (path,))]


def _controls(source: Source) -> list[PageTable]:
    return [_control(source, path, what) for path, what in CONTROLS.items() if source.has(path)]


def _control(source: Source, path: str, what: str) -> PageTable:
    rows = [
        {"dtype": r["dtype"], "fault": r["fault"].replace("_", " ")}
        | {name: int(r[name]) for name in ("values", "values_differing", "lse_differing")}
        for r in source.rows(path)
    ]
    columns = (
        PageColumn("dtype", "dtype"),
        PageColumn("planted", "fault"),
        PageColumn("outputs", "values", whole),
        PageColumn("differing", "values_differing", whole),
        PageColumn("lse differing", "lse_differing", whole),
    )
    title = f"Controls{what}: a comparison that must differ"
    return PageTable(f"bits-controls{what.replace(' ', '-')}", title, columns, rows, (path,), fold=True)


def _recordings(source: Source) -> list[PageTable]:
    rows = []
    again = []
    paths = source.find("recordings/*.xz")
    for path in paths:
        facts, launches = source.recording(path)
        refused = sum("error" in launch for launch in launches)
        rows.append(
            {"file": path.rpartition("/")[2], "library": facts["version"], "gpu": facts["gpu"]}
            | {"sha": facts.get("sha256", "")[:12] or None, "launches": len(launches) - refused, "refused": refused}
        )
        own = (source.root / path).resolve()
        others = [other for other in source.find(f"../*/{path}") if (source.root / other).resolve() != own]
        again += [_repeated(source, path, other) for other in others]
    columns = (
        PageColumn("recording", "file"),
        PageColumn("library", "library"),
        PageColumn("GPU", "gpu"),
        PageColumn("binary", "sha"),
        PageColumn("launches", "launches", whole),
        PageColumn("refused", "refused", whole),
    )
    tables = (
        [PageTable("recordings", "What released kernels returned, by digest", columns, rows, tuple(paths))]
        if paths
        else []
    )
    if again := [row for row in again if row["launches"]]:
        columns = (
            PageColumn("recording", "file"),
            PageColumn("other GPU", "gpu"),
            PageColumn("same launches", "launches", whole),
            PageColumn("digests", "digests", whole),
            PageColumn("that differ", "differing", whole),
        )
        title = "The same launches of the same binaries on another GPU"
        tables.append(PageTable("recordings-again", title, columns, again, tuple(row["file"] for row in again)))
    return tables + _recorded_twins(source)


def _repeated(source: Source, path: str, other: str) -> dict[str, Any]:
    """Digests of one recording that differ from another's, over the launches that both have on equal operands."""
    facts, theirs = source.recording(other)
    known = {_launch(launch): launch for launch in theirs}
    pairs = [(launch, known[_launch(launch)]) for launch in source.recording(path)[1] if _launch(launch) in known]
    digests = [
        pair for a, b in pairs for name in ("out", "lse") for pair in zip(a[name].split(), b[name].split(), strict=True)
    ]
    counts = {"launches": len(pairs), "digests": len(digests), "differing": sum(a != b for a, b in digests)}
    return {"file": path, "gpu": facts["gpu"]} | counts


def _launch(launch: dict[str, Any]) -> str:
    return json.dumps([launch["case"], launch["operands"]], sort_keys=True)


def _recorded_twins(source: Source) -> list[PageTable]:
    path = "recordings/compared.csv"
    if not source.has(path):
        return []
    found: dict[str, Counter[str]] = {}
    for r, is_current in zip(source.rows(path), of_todays_twin(source, path), strict=True):
        outputs = int(r["outputs"])
        counts = found.setdefault(r["recording"], Counter())
        counts.update(launches=1, current=int(is_current), outputs=outputs, differing=int(r["differing"]))
        counts["long"] += outputs * (int(r["keys"]) >= 4096)
    rows = [{"library": look(name).title} | counts for name, counts in found.items()]
    columns = (
        PageColumn("library", "library"),
        PageColumn("launches", "launches", whole),
        PageColumn("of today's twin", "current", whole),
        PageColumn("outputs", "outputs", whole),
        PageColumn("with 4096 keys or more", "long", whole),
        PageColumn("digests that differ", "differing", whole),
    )
    return [PageTable("recorded-twins", "Recordings against our twins of these libraries", columns, rows, (path,))]


def mutants(source: Source) -> Section:
    """How much of what can go wrong the suite finds; judged on twins, whose bits are the device's."""
    blocks: list[Any] = []
    if not source.has(FORWARD_BITS):
        return Section("mutants", "Mutation score")
    if source.has(f"{MUTANTS}/grid.csv"):
        blocks.append(_rules(source, f"{MUTANTS}/grid.csv"))
    if source.has(f"{MUTANTS}/automatic.md"):
        blocks.append(_found(source))
    text = [
        "Faults are planted in the CPU twins, whose bits are those of the device: what is found there is found "
        "here. [All tables](../mutants/README.md)."
    ]
    return Section("mutants", "Mutation score", text if blocks else (), blocks)


def _rules(source: Source, path: str) -> PageTable:
    every = source.rows(path)
    names = list(every[0])
    rules = names[names.index("correct") + 1 :]
    rows = []
    for rule in rules:
        entry: dict[str, Any] = {"rule": rule}
        for key, is_of in (("16", lambda r: r["dtype"] != "e4m3"), ("8", lambda r: r["dtype"] == "e4m3")):
            faults = [r for r in every if is_of(r) and r["correct"] == "0" and r[rule] != ""]
            sound = [r for r in every if is_of(r) and r["correct"] == "1" and r[rule] != ""]
            entry |= {f"faults{key}": len(faults), f"caught{key}": sum(r[rule] == "1" for r in faults)}
            entry |= {f"sound{key}": len(sound), f"alarms{key}": sum(r[rule] == "1" for r in sound)}
        rows.append(entry)
    columns = [PageColumn("rule", "rule")]
    for key, title in (("16", "16 bits"), ("8", "e4m3")):
        columns += [PageColumn(f"{title}: caught", f"caught{key}", whole), PageColumn("of", f"faults{key}", whole)]
        columns += [PageColumn("false alarms", f"alarms{key}", whole), PageColumn("of", f"sound{key}", whole)]
    return PageTable("rules", "Planted faults by the rules of eight projects", columns, rows, (path,))


def _found(source: Source) -> PageTable:
    museum = f"{MUTANTS}/museum.csv"
    automatic = f"{MUTANTS}/automatic.md"
    rows: list[dict[str, Any]] = []
    if source.has(museum):
        plants = [r for r in source.rows(museum) if r["in"] != "-"]
        found = [r for r in plants if r["found by"] != "-"]
        rows.append({"kind": "public reports, planted in the twins", "faults": len(plants), "found": len(found)})
    by_module = next(t for t in source.markdown(automatic) if "equivalent" in t.columns)
    modules = [
        dict(zip(by_module.columns[1:], cells[1:], strict=True)) for cells in by_module.rows if cells[0] != "all"
    ]
    counted = {name: sum(int(m[name]) for m in modules) for name in ("mutants", "equivalent", "not finished", *FINDERS)}
    faults = counted["mutants"] - counted["equivalent"] - counted["not finished"]
    found = sum(counted[name] for name in FINDERS)
    rows.append({"kind": "edits of the twins' source that no argument covers", "faults": faults, "found": found})
    for row in rows:
        row["share"] = row["found"] / row["faults"]
    columns = (
        PageColumn("faults", "kind"),
        PageColumn("planted", "faults", whole),
        PageColumn("found by quick, without bits", "found", whole),
        PageColumn("share", "share", percent),
    )
    return PageTable("mutation-score", "Found by the quick profile", columns, rows, (museum, automatic))


def sanitizer(source: Source) -> Section:
    """Launches under compute-sanitizer by tool and what it reports."""
    path = "sanitizer/sanitizer.csv"
    if not source.has(path):
        return Section("sanitizer", "Sanitizer")
    found: dict[tuple[str, str], Counter[str]] = {}
    launches: dict[str, set[str]] = {}
    for r in source.rows(path):
        launches.setdefault(r["tool"], set()).add(r["launch"])
        key = (r["tool"], r["report"] or "nothing")
        found.setdefault(key, Counter()).update(
            rows=1, explained=bool(r["explained"]), incomplete=r["complete"] != "True"
        )
    rows = [
        {"tool": tool, "report": report, "of": len(launches[tool])} | counts for (tool, report), counts in found.items()
    ]
    columns = (
        PageColumn("tool", "tool"),
        PageColumn("launches", "of", whole),
        PageColumn("reports", "report"),
        PageColumn("places", "rows", whole),
        PageColumn("explained by a barrier", "explained", whole),
        PageColumn("not run to the end", "incomplete", whole),
    )
    note = (
        "Launches that changed since they were examined are not among these. A report passes only where the machine "
        "code shows the barrier that orders the two accesses. racecheck does not relate a barrier to itself at another "
        "place of the code; synccheck takes a barrier that two warpgroups meet from two places for divergence."
    )
    table = PageTable(
        "sanitizer",
        "Shipped kernels under compute-sanitizer",
        columns,
        rows,
        (path,),
        note,
    )
    return Section("sanitizer", "Sanitizer", (), [table])


def microbenchmarks(source: Source) -> Section:
    """How many experiments the simulator's constants of this machine come from."""
    path = "simulator/microbench/microbench.csv"
    if not source.has(path):
        return Section("microbench", "Microbenchmarks")
    counts = Counter(r["experiment"] for r in source.rows(path))
    rows = [{"experiment": name.replace("_", " "), "rows": n} for name, n in sorted(counts.items())]
    columns = (PageColumn("experiment", "experiment"), PageColumn("rows", "rows", whole))
    title = f"{len(rows)} kinds of experiments, {sum(counts.values()):,} rows"
    table = PageTable("microbench", title, columns, rows, (path,), fold=True)
    text = [
        "What the simulator knows of this machine: its constants are derived from these rows by `python -m "
        "fa3_reports.microbench.constants`."
    ]
    return Section("microbench", "Microbenchmarks", text, [table])
