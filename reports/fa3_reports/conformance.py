"""The conformance list: what every clause demands, and which kernels of the atlas meet it; two pages in Markdown.

A demand is read from the code that checks it: the statement of a property, a rule of the gate, a row of the table of
special values, a field of the policy. ``fa3verify/data/clauses.toml`` gives it a number and a version, and holds its
digest, which another demand does not have.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.merging import merge
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify import __version__, operations
from fa3verify.campaign import atlas
from fa3verify.campaign.findings import SEVERITIES, with_clause
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.campaign.summary import WHOLE
from fa3verify.cases.case import Case
from fa3verify.files import markdown_table, write_text
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging import gate
from fa3verify.judging.clauses import NO_RESULT, Clause, clauses
from fa3verify.judging.family import FamilyRow, Figured
from fa3verify.judging.judgement import judge
from fa3verify.judging.metrics import measures_of
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.policy import VALUES, Policy
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.properties import LAWS, POLICY
from fa3verify.properties.policy import EFFECTS, Rule

ROOT = Path(__file__).parents[2]
LIST = Path("docs/conformance.md")
MET = Path("reports/atlas/conformance.md")
COMMAND = "python -m fa3_reports clauses"
SPECIAL = "law special_values_follow_policy"
EMPTY = "law empty_rows_are_zero"
BOUND = "{operation}: L1 error / bound"
ASKED_BY = {  # by field of the policy: the clause that asks for it
    "empty_out": EMPTY,
    "empty_lse": EMPTY,
    "special_values": SPECIAL,
    "causal": BOUND,
}
CONTROLS = "tests/quality/test_clauses.py"

THEOREMS = "reference/README.md"
SECTIONS = (
    "the error bound",
    "the bound of gradients",
    "the bound of a merge",
    "what a quantiser stores",
    "the enclosure",
    "calls that serve",
)
SERIES = {
    "P": "Properties: two calls that must agree, or what mathematics says of one",
    "B": "Bounds and bits: every judged case beside the truth",
    "S": "Special values: what NaN and infinities do",
    "D": "Declarations: what a kernel may declare to do otherwise",
    "R": "Baseline: no figure of a family worse than the stored one",
    "C": "Calls",
}
TRACKERS = {
    "FA": "Dao-AILab/flash-attention",
    "FI": "flashinfer-ai/flashinfer",
    "vLLM": "vllm-project/vllm",
    "vFA": "vllm-project/flash-attention",
    "SGLang": "sgl-project/sglang",
    "torch": "pytorch/pytorch",
    "cuDNN": "NVIDIA/cudnn-frontend",
}


INTRODUCTION = """# Conformance list

{count} clauses by which `fa3verify verify` judges kernels. Cite one by its number and its version: "conforms to
FA3V-P07, version 1". A finding in `summary.json` names the clause that the kernel does not meet
(`failures[].clause`). [Who meets which](../reports/atlas/conformance.md) is a table of the atlas.

A kernel conforms to a clause where every task that asks for it ran and found nothing, in a campaign whose profile and
version are stated with it. That is no proof about calls that were not made ([limits](limits.md)). What a kernel
[declares](declarations.md) to do otherwise is not held against it, and is stated with it.

**Versions.** A number is never given again: a clause that is withdrawn leaves its number behind. A version is raised
when the demand is another, stricter or weaker, so that a kernel may meet the one and not the other. Other words for
the same demand, a check that searches better, and another reason or source leave it as it is.
`fa3verify/data/clauses.toml` holds the version of each clause beside a digest of what it demands, and of a bound also
of its size on two problems of each format; a test fails when either changes, and whoever changed it raises the version
or says that the demand is the same by renewing the digest alone. The digest does not see the code of a check: that is
what the kernel or the test behind "Shown by" is for.

The words of a demand are those of the code that checks it, and this page is made of them by `{command}`. A bound is a
theorem of [fa3_reference](../reference/README.md). Findings call bits L0, the bound L1, the baseline L2 and a
property a law. Beside it FA means flash-attention, vFA the fork of vLLM, FI FlashInfer.
"""
WHO = """# Who meets which clause

{count} kernels of the [atlas](README.md) and the clauses of the [conformance list](../../docs/conformance.md). Made
of `*/atlas.json.xz` by `{command}`.

All rows are of: {profiles}. No row records the versions of clauses: it stands for the demands as they were when the
kernel was judged. Versions older than {version} judged {older} of them. Where one did, it stands behind the name of the
kernel: demands have changed and come up since, and what did not exist was not asked.
"""


class Demand(NamedTuple):
    """What a clause demands, in whole sentences, what asks for it, and why, where the code says that."""

    text: str
    asked: str
    why: str = ""


def sentence(words: str) -> str:
    """Return words as a sentence; a name in front of them keeps its letters.

    >>> sentence("a code is near"), sentence("dO of zeros gives zeros"), sentence("q, k and v are large")
    ('A code is near.', 'dO of zeros gives zeros.', 'q, k and v are large.')
    """
    return f"{words if re.match(r'[b-z][, ]|[^ ]*[A-Z0-9_]', words) else words[0].upper() + words[1:]}."


def demands() -> dict[str, Demand]:
    """Return every demand that a kernel can fail, by what its clause is of."""
    found: dict[str, Demand] = {}
    for law in LAWS:
        text = sentence(law.statement) + (" It is asked of kernels that claim it." if law.kind == "invariant" else "")
        found[f"law {law.name}"] = Demand(text, f"property `{law.name}` of {' and '.join(law.operations)}")
    return found | dict(_gate()) | dict(_special()) | dict(_declared()) | dict(_baseline()) | _calls()


def _gate() -> Iterator[tuple[str, Demand]]:
    """Yield the rules of bits and bound, as the gate makes them of a family that has every figure."""
    asked = "every family of inputs, and the covering array"
    for operation in operations.OPERATIONS.values():
        measures = measures_of(operation)
        figures: dict[str, float | None] = dict.fromkeys((*measures, "quantisation_bound_ratio"), 0.0)
        kernel = Figured("", (FamilyRow("", figures),), operation.name)
        what = " ".join((operation.__doc__ or "").split())
        names = [output.name for output in operation.outputs if output.main]
        main = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
        for row in (*gate.bit_rows(kernel), *gate.bound_rows(kernel)):
            key = f"{row.layer} {row.rule}"
            side = row.rule.removesuffix("error / bound").strip() or main
            text = f"No element of {side} differs from the exact result by more than its bound of rounding errors."
            if row.limit == 0:
                text = sentence(f"There are no {measures[row.telling][1]}")
            elif row.telling not in measures:
                text = f"The largest {row.rule} is at most 1, of what quantising its inputs does to an output."
            elif row.telling == "ratio_max":
                text = f"{text} This is asked of kernels of {operation.name}: {what}"
            of = f"{operation.name}: {key}" if row.telling.startswith("ratio_") else key
            yield of, Demand(text, asked)
    text = f"The largest {WHOLE} is at most 1 under one hypothesis about a kernel that states no order of operations."
    yield f"L1 {WHOLE}", Demand(text, f"{asked}, and every property that asks for a bound")


def _special() -> Iterator[tuple[str, Demand]]:
    for rule in POLICY:
        alone = f" Rows that see nothing else {EFFECTS[rule.alone]}." if rule.alone else ""
        planted = f"{rule.value:+} in an element of {rule.tensor.upper()}".replace("+nan", "NaN").replace("inf", "Inf")
        planted += ", which is the score of a query of 1," if rule.unit_query else ""
        text = f"After {planted} rows that see it {EFFECTS[rule.seen]}.{alone} All other rows {EFFECTS[rule.unseen]}."
        yield f"rule {rule.name}", Demand(text, f"property `{SPECIAL.split()[1]}`", sentence(rule.reason))


def _declared() -> Iterator[tuple[str, Demand]]:
    """Yield the fields of the policy, with the words of its docstring."""
    told = re.findall(r"^(\w+) : \{.+\}, optional\n((?:    .+\n?)+)", inspect.getdoc(Policy) or "", re.MULTILINE)
    for name, words in told:
        plain = re.sub(r":\w+:`([^`]+)`|``([^`]+)``", r"`\1\2`", " ".join(words.split()))
        text = f"A kernel that declares nothing has `{name}` `{VALUES[name][0]}`: {plain[0].lower()}{plain[1:]}"
        asked = ASKED_BY[name]
        by = "the error bound of causal calls" if asked == BOUND else f"property `{asked.split()[1]}`"
        yield f"policy {name}", Demand(text, by)


def _baseline() -> Iterator[tuple[str, Demand]]:
    for rule in gate.POLICY:
        margin = f"{rule.relative:.0%} and {rule.absolute:g}"
        text = f"`{rule.measure}` of a family exceeds the stored figure by at most {margin}"
        text += ", and by 5% and four standard deviations of the count where that is less." if rule.counted else "."
        yield f"L2 {rule.measure}", Demand(text, "every family that the baseline holds", sentence(rule.why))


def _calls() -> dict[str, Demand]:
    words = SEVERITIES[NO_RESULT]
    return {NO_RESULT: Demand(f"This never happens: {words[0].lower()}{words[1:]}", "every call of a campaign")}


JUDGED = ("twin.fp16", "twin.bf16", "twin.e4m3", "twin.quantize", "twin.backward.fp16", "twin.backward.bf16")


def _merged(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge parts exactly, and round once."""
    out, lse = merge(outs.swapaxes(2, 3), lses)
    return out.swapaxes(1, 2).astype(outs.dtype), lse.astype(np.float32)


MASKS: tuple[dict[str, Any], ...] = ({"causal": True}, {"window": (40, 0), "softcap": 8.0})


def bounds() -> dict[str, list[str]]:
    """Return what the bounds are on some problems, to four digits, by what their clauses are of."""
    found: dict[str, list[str]] = {}
    merging = array_kernel(_merged, dtypes=("fp16", "bf16", "fp32"), merge="parts")
    for kernel, mask in product([*map(registry.find, JUDGED), *merging], MASKS):
        name = kernel.name
        operation = operations.find(kernel.operation)
        problem = AttentionProblem(1, 2, 1, 21, 150, 64, dtype=kernel.dtype, **mask)
        scheme = QuantScheme() if name == "twin.e4m3" else None
        changes = (("subtract_k_mean", True),) if name == "twin.quantize" and not problem.softcap else ()
        case = Case(name, problem, Recipe("normal"), scheme, changes, operation.name)
        for of, figure in _bounds_of(kernel, case):
            found.setdefault(of, []).append(figure)
    return found


def _bounds_of(kernel: Kernel, case: Case) -> Iterator[tuple[str, str]]:
    """Yield the mean bound of every output, that of a kernel that states no order, and what stands beside them."""
    operation = operations.find(kernel.operation)
    judged = judge(kernel, case)
    for output in operation.outputs:
        if (bound := judged.bound.get(output.name)) is not None:
            rule = "error / bound" if output.main else f"{output.words} error / bound"
            yield f"{operation.name}: L1 {rule}", _mean(bound)
    if "outside" in judged.measures:
        rule = "L1 outside the stated order, assuming the tensor-core model"
        yield rule, f"{judged.measures['determined']:.4g}"
    if beside := judged.quantisation:
        yield "L1 quantisation error / its own bound", f"{beside['bound_ratio']:.4g}"
    if operation.has_orders:
        for bound in judge(replace(kernel, order=None), case).bound.values():
            yield f"L1 {WHOLE}", _mean(bound)


def _mean(bound: np.ndarray) -> str:
    return f"{float(np.mean(bound[np.isfinite(bound)])):.4g}"


def digests() -> dict[str, str]:
    """Return the digest of every demand by what its clause is of: of its words, and of a bound on some problems."""
    figures = bounds()
    return {
        of: hashlib.sha256(" ".join((demand.text, *figures.get(of, ()))).encode()).hexdigest()[:12]
        for of, demand in demands().items()
    }


def render() -> dict[Path, str]:
    """Return the text of both pages by their place."""
    return {LIST: _list(demands()), MET: _met(_entries(sorted((ROOT / MET.parent).glob("*/atlas.json*"))))}


def write(root: Path = ROOT) -> list[Path]:
    """Write both pages and return their places."""
    for place, text in render().items():
        write_text(root / place, text)
    return [root / place for place in (LIST, MET)]


def _list(found: Mapping[str, Demand]) -> str:
    lines = [*INTRODUCTION.format(command=COMMAND, count=len(clauses())).splitlines(), ""]
    for letter, title in SERIES.items():
        lines += [f"## {title}", ""]
        for clause in clauses().values():
            if clause.number[0] == letter:
                lines += [*_told(clause, found[clause.of]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _told(clause: Clause, demand: Demand) -> Iterator[str]:
    """Yield the lines of one clause."""
    shown = f"`{clause.shown}` fails it ([test](../{CONTROLS}))"
    if clause.shown.startswith("tests/"):
        path, _, name = clause.shown.partition("::")
        shown = f"[{name.replace('_', ' ')}](../{path})"
    yield f"### FA3V-{clause.number}"
    yield ""
    yield f"`{clause.of}`, version {clause.version}. {demand.text}"
    yield ""
    yield f"- Why: {demand.why or clause.why}"
    yield f"- Source: {_linked(clause.source)}"
    yield f"- Asked by: {demand.asked}"
    yield f"- Shown by: {shown}"


def _linked(source: str) -> str:
    """Return a source with links to the threads that it names, as FA#1745."""

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}](https://github.com/{TRACKERS[match[1]]}/issues/{match[2]})"

    linked = re.sub(r"\b(\w+)#(\d+)", link, source)
    linked = re.sub(r"\bfinding (\d{4})", r"[finding \1](../reports/findings/README.md)", linked)
    for section in SECTIONS:
        heading = f"{THEOREMS}, {section}"
        linked = linked.replace(heading, f"[{section}](../{THEOREMS}#{section.replace(' ', '-')})")
    return re.sub(r"(?<![\w/(])(docs|reports)/[\w./-]+\.md", r"[\g<0>](../\g<0>)", linked)


def _entries(files: Iterable[Path]) -> list[tuple[Run, KernelRun]]:
    """Return the kernels that were judged, of each and its device what was judged last."""
    found: dict[tuple[str, str | None], tuple[Run, KernelRun]] = {}
    for made in sorted((atlas.read(file) for file in files), key=lambda made: made.started):
        found |= {(e.name, e.introduction.identity.device): (made, e) for e in made.kernels if e.verdict != "not run"}
    return list(found.values())


PASS, FAIL, PART, DECLARED, UNKNOWN, NOT_ASKED = "pass", "fail", "in part", "declared", "not recorded", "not asked"
SIGNS = {PASS: "✓", FAIL: "**✗**", PART: "(✓)", DECLARED: "d", UNKNOWN: "?", NOT_ASKED: "·"}
MEANINGS = {
    PASS: "every task that asks for it ran and found nothing",
    FAIL: "a task found that the kernel does not meet it",
    PART: "nothing was found, but calls of a task that asks for it gave no result",
    DECLARED: "the kernel declares to do otherwise, or does not claim it",
    UNKNOWN: "the atlas does not say",
    NOT_ASKED: "no task asked, as the kernel takes no such call, returns no such output, or has no twin",
}


def status(made: Run, entry: KernelRun) -> dict[str, str]:
    """Return what became of every clause in the judgement of a kernel, by what the clause is of."""
    findings = atlas.findings(made, entry.name)
    broken = {with_clause(each, entry.operation).clause for each in findings}
    rules = {each.seen.rule for each in findings if each.seen}
    declared = {words.split()[0] for words in entry.introduction.policy}
    found = dict.fromkeys(clauses(), UNKNOWN)
    found |= _of_properties(entry) | _of_gate(entry, clauses()[NO_RESULT].name in broken)
    found[NO_RESULT] = PASS
    if entry.introduction.states_order or entry.operation == "quantize":
        found[f"L1 {WHOLE}"] = NOT_ASKED
    found |= {clause.of: FAIL for clause in clauses().values() if clause.name in broken}
    if "special_values" in declared and entry.operation == operations.FORWARD and found[SPECIAL] != FAIL:
        found[SPECIAL] = DECLARED
    for rule in POLICY:
        found[f"rule {rule.name}"] = _of_rule(entry, rule, found[SPECIAL], rules)
    for name, of in ASKED_BY.items():
        asked = found[of.format(operation=entry.operation)]
        unsaid = UNKNOWN if asked in (FAIL, DECLARED) else asked
        found[f"policy {name}"] = DECLARED if name in declared else unsaid
    if entry.operation == "quantize" or (entry.coverage and "feature causal" in entry.coverage.not_claimed):
        found["policy causal"] = NOT_ASKED
    return found


def _of_properties(entry: KernelRun) -> dict[str, str]:
    words = {"pass": PASS, "fail": FAIL, "not_claimed": DECLARED}
    told = {each.law: words.get(each.status, NOT_ASKED) for each in entry.laws}
    not_claimed = entry.coverage.not_claimed if entry.coverage else ()
    found = {}
    for law in LAWS:
        unasked = DECLARED if f"property {law.name}" in not_claimed else NOT_ASKED
        found[f"law {law.name}"] = told.get(law.name, unasked)
    return found


def _of_gate(entry: KernelRun, has_crashed: bool) -> dict[str, str]:
    """Return what became of bits and bounds: the gate's own rules, of the figures that the atlas has."""
    found = {of: NOT_ASKED for of, _ in _gate()}
    rows = [*gate.bit_rows(entry.figured), *gate.bound_rows(entry.figured)]
    for key in {(row.layer, row.rule) for row in rows}:
        told = {row.status for row in rows if (row.layer, row.rule) == key}
        of = " ".join(key)
        of = of if of in found else f"{entry.operation}: {of}"
        passed = (PART if has_crashed else PASS) if PASS in told else NOT_ASKED
        found[of] = FAIL if FAIL in told else passed
    return found


def _of_rule(entry: KernelRun, rule: Rule, law: str, broken: Collection[str | None]) -> str:
    """Return what became of a special value: its property tries all in turn, and ends with the first that fails."""
    if law in (FAIL, UNKNOWN):
        return FAIL if rule.name in broken else UNKNOWN
    return NOT_ASKED if entry.dtype == "e4m3" and not math.isnan(rule.value) else law


def _met(entries: Sequence[tuple[Run, KernelRun]]) -> str:
    told = [(made, entry, status(made, entry)) for made, entry in entries]
    older = sum(made.version != __version__ for made, _ in entries) or "none"
    profiles = "; ".join(sorted({f"profile {made.profile}, seed {made.seed}" for made, _ in entries}))
    facts = {"command": COMMAND, "count": len(entries), "older": older, "version": __version__, "profiles": profiles}
    lines = [*WHO.format(**facts).splitlines(), ""]
    lines += [f"- {SIGNS[name]} {name}: {words}" for name, words in MEANINGS.items()]
    lines += ["", "## How many kernels meet each clause", ""]
    rows = []
    for clause in clauses().values():
        by = {name: [_kernel(made, e) for made, e, found in told if found[clause.of] == name] for name in SIGNS}
        rows.append((_number(clause), f"`{clause.of}`", *(len(by[x]) or "" for x in SIGNS), ", ".join(by[FAIL])))
    lines += markdown_table(("clause", "of", *SIGNS, "who fails"), rows)
    judged = {entry.operation for _, entry, _ in told}
    for operation in filter(judged.__contains__, operations.OPERATIONS):
        mine = [row for row in told if row[1].operation == operation]
        asked = [c for c in clauses().values() if any(row[2][c.of] != NOT_ASKED for row in mine)]
        lines += [f"## Kernels of {operation}", ""]
        for block in (asked[i : i + COLUMNS] for i in range(0, len(asked), COLUMNS)):
            cells = [(_kernel(made, e), *(SIGNS[found[c.of]] for c in block)) for made, e, found in mine]
            lines += markdown_table(("kernel", *map(_number, block)), cells)
    return "\n".join(lines).rstrip() + "\n"


COLUMNS = 18  # of a table, beside the kernel


def _number(clause: Clause) -> str:
    return f"[{clause.number}](../../{LIST}#fa3v-{clause.number.lower()})"


def _kernel(made: Run, entry: KernelRun) -> str:
    """Return the name of a kernel, with what judged it where that is not this version."""
    return entry.name if made.version == __version__ else f"{entry.name} ({made.version})"
