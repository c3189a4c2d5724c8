"""Results of the suite's examinations as Markdown, with the counts that a reader needs to judge them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from fa3verify.mutation.automatic import Fate
from fa3verify.mutation.equivalence import EQUIVALENT

_PARTS = {"crash": "crash", "laws": "properties", "L1": "bound", "L2": "baseline"}


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; cells are written as they are, with bars escaped."""
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def first_part(fate: Fate) -> str:
    """The part of the verdict that found a mutant: bound before baseline, which fail together."""
    return next((name for key, name in _PARTS.items() if key in fate.found_by.split()), "")


def scores(fates: list[Fate], group: Callable[[Fate], str]) -> list[list[object]]:
    """Count fates by a group: mutants, caught by each part, by bits, equivalent, missed, not finished, share caught.

    The share is of the mutants that were finished and are not equivalent; "bits" counts those of which some output
    differed from the sound twin's, whoever found them first.
    """
    groups: defaultdict[str, list[Fate]] = defaultdict(list)
    for fate in fates:
        groups[group(fate)].append(fate)
    rows = []
    for name, own in [*sorted(groups.items()), ("all", fates)]:
        status = Counter(fate.status for fate in own)
        parts = Counter(first_part(fate) for fate in own)
        judged = status["caught"] + status["missed"]
        share = f"{100 * status['caught'] / judged:.1f} %" if judged else "-"
        bits = sum(bool(fate.bits) or "crash" in fate.found_by for fate in own)
        rows.append(
            [name, len(own), *(parts[p] for p in _PARTS.values()), bits, status["equivalent"], status["missed"],
             status["not finished"], share]
        )  # fmt: skip
    return rows


def automatic(fates: list[Fate]) -> str:
    """Return the page of a campaign over automatic mutants."""
    head = ["", "mutants", *_PARTS.values(), "bits or crash", "equivalent", "missed", "not finished", "caught"]
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
