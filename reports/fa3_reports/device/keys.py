"""What ties each file of evidence to the code: its key, and whether that key is the one that the code has now.

Every file that a page may show is declared in :data:`KEYS`. A page asks for each of its tables why the files are
stale, so that no table is shown without a look at its key. A key is renewed by a run, or by a command that proves
equality, and never by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fa3_reports import ledger, recordings
from fa3_reports.audit.evidence import changed_since
from fa3_reports.bench import results
from fa3_reports.device.launches import concerns
from fa3_reports.device.source import Row, Source
from fa3_reports.measured.host_rows import code_keys
from fa3_reports.mutation import provenance
from fa3verify import __version__
from fa3verify.report.tables import count

MULTIPROCESSORS = 132  # of both GPUs that were measured: experiments that fill a GPU depend on it
SEVERAL = "of several versions"  # instead of a hash, where each of the runs has its own
CHANGED = "what the GPU is launched with has changed since it was measured"


def changed_launches(facts: Mapping[str, Any]) -> frozenset[str]:
    """Return which launches have changed since a measurement or one of its runs, by its provenance.

    Where that says of which formats and head dims all of it was (``launched``), others are left out.
    """
    of = facts["evidence_of"]
    runs = facts.get("runs") or [facts]  # where there are runs, each has the keys
    hashed = [run for run in runs if run["launches_sha256"] != SEVERAL]
    found = frozenset().union(*(changed_since(of, run["launches_sha256"], run.get("launches")) for run in hashed))
    own = [(row, part) for row in facts.get("launched", ()) for part in of.split("+")]
    return frozenset(x for x in found if not own or any(concerns(row, frozenset((x,)), part) for row, part in own))


def _launches(source: Source, path: str) -> str:
    """Compare the launches of the provenance beside a file, and count its rows that are of those that have changed.

    All rows are where they do not say of which launches they are. What is no table is made of the tables beside it.
    """
    facts = source.provenance_of(path)
    if facts is None:
        return "no provenance lies beside it"
    about = source.json(facts)
    changed = changed_launches(about)
    is_table = path.endswith((".csv", ".jsonl"))
    folder = Path(path).parent
    beside = [path] if is_table else source.find(f"{folder}/*.csv") + source.find(f"{folder}/*.jsonl")
    tables = [x for x in beside if changed and source.provenance_of(x) == facts]
    rows = [row for x in tables for row in _rows_since(source, x, about, changed)]
    others = len(_concerned(rows, about))
    if not changed or (rows and not others):
        return ""
    some = f"{count(others)} of {count(len(rows))} rows: " if others < len(rows) else ""
    return f"{some}{CHANGED}"


def _concerned(rows: Sequence[tuple[Row, frozenset[str]]], about: Mapping[str, Any]) -> list[Row]:
    """Return the rows of launches that changed since; all of them where one does not say of which launch it is."""
    try:
        return [row for row, since in rows if concerns(row, since, about["evidence_of"])]
    except KeyError:
        return [row for row, _ in rows]


def _rows_since(
    source: Source, path: str, about: Mapping[str, Any], changed: frozenset[str]
) -> list[tuple[Row, frozenset[str]]]:
    """Return the rows of a table, each with the launches that changed since its own run, where records say which that
    was, else since any run.
    """
    rows = Source(source.root).rows(path)
    if not path.endswith(".jsonl"):
        return [(row, changed) for row in rows]
    own = {run["run"]: changed_launches({"evidence_of": about["evidence_of"], **run}) for run in about["runs"]}
    records = results.read(source.root / path).cells.values()
    return list(zip(rows, (own.get(r.run, changed) for r in records for _ in r.kernels), strict=True))


def _own_facts(source: Source, path: str) -> str:
    """Compare the hash of launches that a file has in itself; the older ones have the forward's."""
    facts = source.json(path)
    if "evidence_of" in facts:
        return CHANGED if changed_launches(facts) else ""
    return CHANGED if changed_since("forward", facts["sha256"]) else ""


def _stamps(source: Source, path: str) -> str:
    """Compare the hash that a timeline has in its own head: it is of the one launch that it is called by."""
    head = [line.partition("=")[2] for line in source.text(path).splitlines() if line.startswith("# launches_sha256=")]
    probe = Path(path).name.replace(".stamps.csv", "_stamps")
    return "" if head and probe not in changed_since("timeline", head[0]) else CHANGED


def of_todays_twin(source: Source, path: str) -> list[bool]:
    """Return for each row of a ledger whether its twin, and what the plan hands to it, are as they are now."""
    source.read(path)
    entries = ledger.read(source.root / path)
    given = {}
    for name in {entry.recording for entry in entries}:
        file = f"{Path(path).parent}/{name}.xz"
        source.read(file)
        given[name] = recordings.read(source.root / file)
    current = {*ledger.of_today(entries, given)}
    return [entry in current for entry in entries]


def _twin(source: Source, path: str) -> str:
    """Compare the keys that every row of a ledger has: of its twin, and of what the plan handed to it."""
    current = of_todays_twin(source, path)
    others = current.count(False)
    if not others:
        return ""
    return f"{count(others)} of {count(len(current))} launches were compared with a twin or a plan that changed since"


@cache
def _experiments() -> frozenset[tuple[str, str]]:
    from fa3_reports.microbench.experiment import digest
    from fa3_reports.microbench.suite import chosen

    return frozenset((each.name, digest(each.ptx())) for each in chosen(MULTIPROCESSORS, None))


def _ptx(source: Source, path: str) -> str:
    """Compare the hash of the PTX that every row of a microbenchmark has."""
    rows = source.rows(path)
    changed = {row["experiment"] for row in rows if (row["experiment"], row["ptx_sha256"]) not in _experiments()}
    return f"the PTX of {', '.join(sorted(changed))} has changed since it was measured" if changed else ""


def _judged(source: Source, path: str) -> str:
    """Compare the keys of what was judged and of what judged it, which stand beside the tables of a campaign."""
    place = Path(path)
    kind = place.name.partition(".")[0]
    facts = place.with_name(provenance.name_of(kind)).as_posix()
    if not source.has(facts):
        return "no keys were kept of the twins that were judged and of the rules that judged them"
    changed = provenance.changed(kind, source.json(facts)["keys"])
    return f"{', '.join(changed)} changed since it was judged" if changed else ""


def _version(source: Source, path: str) -> str:
    """Compare the version that judged with the one that is installed."""
    folder = (source.root / path).resolve().parent.name
    known = source.json(path)["version"] if path.endswith(".json") else folder.removeprefix("release-")
    return "" if known == __version__ else f"version {known} judged it, this is {__version__}"


def _host(source: Source, path: str) -> str:
    """Compare the keys of the functions that were timed."""
    facts = source.provenance_of(path)
    known = source.json(facts).get("code_keys") if facts else None
    return "" if known == code_keys() else "what a call runs on the host has changed since it was timed"


def _constant(source: Source, path: str) -> str:
    """Nothing of ours was measured, so that it stays true whatever becomes of the code."""
    return ""


def _none(source: Source, path: str) -> str:
    """No key was kept: nothing says which code it is of."""
    return "no hash of what was measured was kept, so that nothing says whether the code is still the same"


def _undeclared(source: Source, path: str) -> str:
    """Nobody said what ties it to the code."""
    return "no key is declared for it, so that nothing ties it to the code"


Check = Callable[[Source, str], str]


class Key(NamedTuple):
    """Files, by patterns of how their paths end; how their key is compared; and why it is that key."""

    files: tuple[str, ...]
    why_stale: Check
    reason: str


KEYS = (  # the first that fits
    Key(("*_provenance.json", "*_run.json"), _constant, "the facts that keys are read from"),
    Key(("recordings/compared.csv",), _twin, "each row has the keys of the twin that was run and of its plan"),
    Key(
        ("recordings/*.xz", "recordings/*.npz"),
        _constant,
        "what a library's binary of a stated hash returned; no kernel of ours was run",
    ),
    Key(("bits/*.csv", "quantiser/*.csv", "sanitizer/*.csv"), _launches, "our kernels ran"),
    Key(
        ("speed/backward_others/bench.*",),
        _constant,
        "other people's kernels of stated versions; no kernel of ours was run",
    ),
    Key(("speed/*/bench.*", "speed/*/validation.*"), _launches, "our kernels were timed"),
    Key(
        ("simulator/unseen*/*.*", "simulator/schedules_*/*.*", "simulator/overlap/*.*"),
        _launches,
        "our kernels were timed or counted; a test simulates the rows again",
    ),
    Key(("speed/host/*.csv",), _host, "our functions were called; their keys stand beside it"),
    Key(("timelines/*.stamps.csv",), _stamps, "our kernels wrote stamps; the hash stands in the file"),
    Key(
        (
            "microbench/microbench.csv",
            "microbench/sharing.csv",
            "microbench/launch_moves.csv",
            "schedules/microbench.csv",
            "schedules/latencies.csv",
        ),
        _ptx,
        "each row has the hash of the PTX that ran",
    ),
    Key(("microbench/bursts*.csv",), _constant, "launches of kernels that only sleep: a property of the driver"),
    Key(
        ("simulator/backward/measured.csv", "simulator/backward/validation.md"),
        _constant,
        "passes of FlashAttention-3 and of named prototypes, none of which changes; a test simulates them again",
    ),
    Key(("machines/*.toml",), _constant, "a machine's constants; a test derives them again from the microbenchmarks"),
    Key(("atlas/*/atlas.json", "release-*/*.md"), _version, "the version that judged stands in it or in its name"),
    Key(("atlas/*/worst/*.json", "findings/0002_*.json"), _constant, "inputs to be judged again, no results"),
    Key(
        (
            "speed/packed/*.csv",
            "speed/backward/*.csv",
            "speed/head_dims/*.csv",
            "speed/unlisted/*.csv",
            "speed/assembler/*.csv",
            "speed/boxes/*.csv",
            "speed/merge/*.csv",
            "serving/launches.csv",
            "tune/*.csv",
        ),
        _none,
        "measured by scripts of a note, which kept no hash of the launches",
    ),
    Key(
        ("model/model.json", "decoding/decoding.json", "serving/serving.json", "speed/tiles/*.json"),
        _own_facts,
        "models, or our kernels beside others, ran; the hash stands in the file",
    ),
    Key(
        ("logprobs/random_models.csv",),
        _constant,
        "twins and torch on a CPU, in models with random weights; a test measures half of the rows again",
    ),
    Key(
        ("logprobs/budget_smollm2.csv",),
        _constant,
        "twins of one release of FlashAttention-3 in one trained model, on texts as they were that day",
    ),
    Key(
        ("logprobs/planted_mistakes.csv",),
        _constant,
        "mistakes planted in twins on a CPU, in one trained model and random ones, on texts as they were that day",
    ),
    Key(("logprobs/llama_1b_h200.csv",), _launches, "our kernels and others ran in a model with random weights"),
    Key(("speed/drawn/predicted.csv",), _constant, "what was predicted before the launches were timed"),
    Key(("serving/parts.json",), _none, "timed of kernels with fewer registers at their entry than they have now"),
    Key(("suites/suites.csv",), _none, "other projects' tests, which call ours and say nothing of launches"),
    Key(("training/losses.csv",), _launches, "our kernels ran in a small model"),
    Key(
        (*(f"mutants/{kind}.csv" for kind in provenance.ROOTS), "mutants/automatic.md"),
        _judged,
        "mistakes planted in twins, or the twins as they are, were judged",
    ),
    Key(
        ("mutants/bound_terms.csv", "mutants/automatic_2026_11_23.csv", "hunt/curves.csv", "invariance/table.json"),
        _none,
        "searches among twins, which kept no hash of the twins and of the rules",
    ),
    Key(
        ("accumulator_loss/peers.csv",),
        _constant,
        "one run of other people's kernels, at head_dim 64 with 4 heads and 256 queries; no kernel of ours was run",
    ),
    Key(
        ("schedules/clocked.csv", "schedules/facts.json"),
        _constant,
        "other people's kernels, of which the list names repository and commit; no kernel of ours was run",
    ),
    Key(("findings/0006_low_lse.csv",), _constant, "gradients of libraries of a stated version, judged by float64"),
    Key(
        ("mutants/harness.*",),
        _none,
        "edits of the code as it stood, told apart by the edited lines",
    ),
    Key(
        (
            "findings/known.json",
            "claims.toml",
            "page.toml",
            "mutants/harness_survivors.toml",
            "strangers/*.toml",
            "schedules/*.toml",
        ),
        _constant,
        "written by hand",
    ),
    Key(
        ("tables/*.csv", "claims.json", "report.json"),
        _constant,
        "made from the other files; a test makes them again, byte for byte",
    ),
)


UNDECLARED = Key((), _undeclared, "nobody said what ties it to the code")


def key_of(place: Path) -> Key:
    """Return the key that is declared for a file of evidence, :data:`UNDECLARED` if none is."""
    fitting = (key for key in KEYS if any(place.match(pattern) for pattern in key.files))
    return next(fitting, UNDECLARED)


def why_stale(source: Source, path: str) -> str:
    """Return why a file is not known to show the code as it is now, empty if its key says that it does."""
    return key_of((source.root / path).resolve()).why_stale(source, path)


def is_stale(source: Source, path: str, shown: Callable[[Row], bool]) -> bool:
    """Tell whether a file is not known to show the code as it is now; of the records of a bench, by the rows shown."""
    reason = why_stale(source, path)
    facts = source.provenance_of(path) if path.endswith(".jsonl") else None
    if facts is None or not reason:
        return bool(reason)
    about = source.json(facts)
    return any(map(shown, _concerned(_rows_since(source, path, about, changed_launches(about)), about)))
