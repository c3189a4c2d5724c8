"""Results of the suite's examinations as Markdown, with the counts that a reader needs to judge them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from fa3_reports.mutation.automatic import Fate
from fa3_reports.mutation.equivalence import EQUIVALENT
from fa3_reports.mutation.examine import Examination
from fa3_reports.mutation.grid import Verdicts
from fa3_reports.mutation.museum import Exhibit
from fa3_reports.mutation.rules import OURS, RULES
from fa3_reports.mutation.sound import Tally
from fa3verify.files import markdown_table

_PARTS = {"crash": "crash", "laws": "properties", "hazards": "hazards", "L1": "bound", "L2": "baseline"}

_OF_KERNELS = ("crash", "properties", "bound", "baseline")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; cells are written as they are, with bars escaped."""
    escaped = ([str(cell).replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(markdown_table(head, escaped, rule=" --- "))


def part_of(found_by: Iterable[str]) -> str:
    """The part of the verdict that found something: bound before baseline, which fail together."""
    return next((name for key, name in _PARTS.items() if key in found_by), "")


def scores(fates: list[Fate], group: Callable[[Fate], str]) -> list[list[object]]:
    """Count fates by a group: mutants, caught by each part, by bits, equivalent, missed, not finished, share caught.

    The share is of the mutants that were finished and are not equivalent; "with bits" counts the caught ones and those
    of which some output differed from the sound twin's.
    """
    groups: defaultdict[str, list[Fate]] = defaultdict(list)
    for fate in fates:
        groups[group(fate)].append(fate)
    rows = []
    for name, own in [*sorted(groups.items()), ("all", fates)]:
        status = Counter(fate.status for fate in own)
        parts = Counter(part_of(fate.found_by.split()) for fate in own)
        judged = status["caught"] + status["missed"]
        share = f"{100 * status['caught'] / judged:.1f} %" if judged else "-"
        bits = sum(bool(fate.bits or fate.found_by) for fate in own)
        rows.append(
            [
                name,
                len(own),
                *(parts[p] for p in _OF_KERNELS),
                bits,
                status["equivalent"],
                status["missed"],
                status["not finished"],
                share,
            ]
        )
    return rows


def automatic(fates: list[Fate]) -> str:
    """Return the page of a campaign over automatic mutants."""
    head = ["", "mutants", *_OF_KERNELS, "with bits", "equivalent", "missed", "not finished", "caught"]
    text = ["## By module\n", markdown(head, scores(fates, lambda fate: fate.mutant.module))]
    text += ["\n## By operator\n", markdown(head, scores(fates, lambda fate: fate.mutant.operator))]
    text += [f"\n{_times(fates)}\n"]
    missed = [fate for fate in fates if fate.status == "missed"]
    text += ["\n## Missed\n", markdown(["mutant", "bits"], [[f.mutant.identity, f.bits or "equal"] for f in missed])]
    equal = [fate for fate in fates if fate.status == "equivalent"]
    rows = [[f.mutant.identity, " ".join(EQUIVALENT[f.mutant.identity].split())] for f in equal]
    return "\n".join([*text, "\n## Equivalent\n", markdown(["mutant", "why"], rows)])


def _times(fates: list[Fate]) -> str:
    killed = [f for f in fates if f.status == "caught"]
    spent = [sum(row.seconds for row in f.rows) for f in killed]
    if not spent:
        return "Nothing was caught."
    return (
        f"{sum(spent) / len(spent):.1f} s per caught mutant on average, {sorted(spent)[len(spent) // 2]:.1f} s median."
    )


def museum_rows(
    results: Sequence[tuple[Exhibit, Examination]], outside: Mapping[int, str]
) -> tuple[list[str], list[list[object]]]:
    """Return head and rows of the museum, what is outside our surface with the reason."""
    head, planted = exhibit_rows(results)
    rows = [[exhibit.row, *row] for (exhibit, _), row in zip(results, planted, strict=True)]
    rows += [[number, f"outside: {why}", "-", "-", "-", "-"] for number, why in outside.items()]
    return ["report", *head], sorted(rows, key=lambda row: int(str(row[0])))


def exhibit_rows(results: Sequence[tuple[Exhibit, Examination]]) -> tuple[list[str], list[list[object]]]:
    """Return head and rows of what was planted and what found it."""
    head = ["planted", "in", "found by", "task", "bits"]
    return head, [[e.what, e.kernel, part_of(x.found_by) or "-", x.task or "-", x.bits or "-"] for e, x in results]


def uncommon(results: Sequence[tuple[Exhibit, Examination]]) -> str:
    """Return the page of what only uncommon inputs show."""
    found = sum(bool(x.found_by) for _, x in results)
    return f"## Uncommon inputs\n\n{found} of {len(results)} plants found.\n\n{markdown(*exhibit_rows(results))}"


def museum(results: Sequence[tuple[Exhibit, Examination]], outside: Mapping[int, str], reports: int) -> str:
    """Return the page of the museum: a report is found if all its plants are."""
    by_report: defaultdict[int, list[Examination]] = defaultdict(list)
    for exhibit, examination in results:
        by_report[exhibit.row].append(examination)
    found = sum(all(x.found_by for x in own) for own in by_report.values())
    bits = sum(all(x.found_by or x.bits for x in own) for own in by_report.values())
    counts = (
        f"{reports} reports: {len(by_report)} planted ({len(results)} plants), {len(outside)} outside our surface. "
        f"Found {found} without bits, {bits} with.\n"
    )
    return f"## Museum\n\n{counts}\n{markdown(*museum_rows(results, outside))}"


def grid_rows(verdicts: Sequence[Verdicts]) -> tuple[list[str], list[list[object]]]:
    """Return head and rows of the grid: 1 where a rule rejects a kernel, nothing where it was not asked."""
    rules = _rules(verdicts)
    head = ["dtype", "seqlen_k", "family", "seed", "kernel", "correct", *rules]
    rows: list[list[object]] = [
        [v.cell.dtype, v.cell.seqlen_k, v.cell.family, v.cell.seed, v.kernel, int(v.is_correct)]
        + [int(v.rejected[rule]) if rule in v.rejected else "" for rule in rules]
        for v in verdicts
    ]
    return head, rows


def _rules(verdicts: Sequence[Verdicts]) -> list[str]:
    return [rule for rule in (*OURS, *RULES) if any(rule in v.rejected for v in verdicts)]


def grid(verdicts: Sequence[Verdicts]) -> str:
    """Return the page of the grid: faults caught and correct kernels rejected, by rule and family, for each dtype."""
    text = ["## Rules on the same faults and inputs\n"]
    for dtype in dict.fromkeys(v.cell.dtype for v in verdicts):
        own = [v for v in verdicts if v.cell.dtype == dtype]
        families = list(dict.fromkeys(v.cell.family for v in own))
        faults = [v for v in own if not v.is_correct]
        groups = [faults, *([v for v in faults if v.cell.family == family] for family in families)]
        groups.append([v for v in own if v.is_correct])
        names = ["caught", *families, "false alarms"]
        head = [dtype, *(f"{name} /{len(group)}" for name, group in zip(names, groups))]
        text.append(markdown(head, [[rule, *(_rejections(rule, group) for group in groups)] for rule in _rules(own)]))
        text.append(_by_fault(dtype, faults))
    return "\n".join(text)


def _rejections(rule: str, group: Sequence[Verdicts]) -> str:
    """How many a rule rejects; of how many, where it was not asked of all."""
    asked = [v.rejected[rule] for v in group if rule in v.rejected]
    return f"{sum(asked)}" if len(asked) == len(group) else f"{sum(asked)} of {len(asked)}" if asked else "-"


def _by_fault(dtype: str, faults: Sequence[Verdicts]) -> str:
    rules = _rules(faults)
    rows = []
    for name in dict.fromkeys(v.kernel for v in faults):
        own = [v for v in faults if v.kernel == name]
        rows.append([f"{name} /{len(own)}", *(_rejections(rule, own) for rule in rules)])
    return markdown([f"{dtype}, by fault", *rules], rows)


def sound(found: Iterable[Tally]) -> str:
    """Return the page of a campaign over sound kernels: per kernel what was tried, and every false alarm in words."""
    kernels: defaultdict[str, list[Tally]] = defaultdict(list)
    for tally in found:
        kernels[tally.kernel].append(tally)
    body = [
        [
            name,
            len({x.task for x in own}),
            f"{sum(x.trials for x in own):,}",
            f"{sum(x.outputs for x in own):,}",
            sum(len(x.alarms) for x in own),
        ]
        for name, own in [*kernels.items(), ("all", [x for own in kernels.values() for x in own])]
    ]
    alarms = [
        f"- {x.kernel}, {x.task}, seed {x.seed}: {y}\n" for own in kernels.values() for x in own for y in x.alarms
    ]
    head = ["kernel", "properties and families", "trials", "output values", "false alarms"]
    return "".join(["## Sound kernels in different orders\n\n", markdown(head, body), "\n" if alarms else "", *alarms])
