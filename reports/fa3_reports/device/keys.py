"""What ties each file of evidence to the code: its key, and whether that key is the one that the code has now.

Every file that a page may show is declared in :data:`KEYS`. A page asks for each of its tables why the files are
stale, so that no table is shown without a look at its key. A key is renewed by a run, or by a command that proves
equality, and never by hand.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fa3_kernels.audit.evidence import evidence_sha256
from fa3_reports.closure import twin_hash
from fa3_reports.device.source import Source
from fa3verify import __version__
from fa3verify.report.notation import count

MULTIPROCESSORS = 132  # of both GPUs that were measured: experiments that fill a GPU depend on it
CHANGED = "what the GPU is launched with has changed since it was measured"


def is_of_these_launches(facts: Mapping[str, Any]) -> bool:
    """Tell whether what was launched, by its provenance and that of all its runs, is what is launched now."""
    hashes = {facts["launches_sha256"], *(run["launches_sha256"] for run in facts.get("runs", ()))}
    return hashes == {evidence_sha256(facts["evidence_of"])}


def _launches(source: Source, path: str) -> str:
    """Compare the hash of all launches in the provenance beside a file."""
    facts = source.provenance_of(path)
    if facts is None:
        return "no provenance lies beside it"
    return "" if is_of_these_launches(source.json(facts)) else CHANGED


def _forward(source: Source, path: str) -> str:
    """Compare the hash of the forward's launches that a file has in itself."""
    return "" if source.json(path)["sha256"] == evidence_sha256("forward") else CHANGED


def _stamps(source: Source, path: str) -> str:
    """Compare the hash that a timeline has in its own head."""
    now = f"# launches_sha256={evidence_sha256('timeline')}"
    return "" if now in source.text(path).splitlines() else CHANGED


def of_todays_twin(source: Source, path: str) -> list[bool]:
    """Return for each row of a ledger whether its twin is the twin that the code has now."""
    rows = source.rows(path)
    folder = Path(path).parent
    now = {name: twin_hash(_library(source, f"{folder}/{name}.xz")) for name in {row["recording"] for row in rows}}
    return [row["twin"] == now[row["recording"]] for row in rows]


def _library(source: Source, path: str) -> str:
    """Return which library a recording is of."""
    head, _, _ = lzma.decompress(source.read(path)).partition(b"\n")
    return str(json.loads(head)["library"])


def _twin(source: Source, path: str) -> str:
    """Compare the hash of the twin that every row of a ledger has."""
    current = of_todays_twin(source, path)
    others = current.count(False)
    if not others:
        return ""
    return f"{count(others)} of {count(len(current))} launches were compared with a twin whose code has changed since"


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


def _version(source: Source, path: str) -> str:
    """Compare the version that judged with the one that is installed."""
    folder = (source.root / path).resolve().parent.name
    known = source.json(path)["version"] if path.endswith(".json") else folder.removeprefix("release-")
    return "" if known == __version__ else f"version {known} judged it, this is {__version__}"


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
    Key(("recordings/compared.csv",), _twin, "each row has the hash of the twin that was run"),
    Key(
        ("recordings/*.xz", "recordings/*.npz"),
        _constant,
        "what a library's binary of a stated hash returned; no kernel of ours was run",
    ),
    Key(("bits/*.csv", "quantiser/*.csv", "sanitizer/*.csv"), _launches, "our kernels ran"),
    Key(("speed/*/bench.*", "speed/*/validation.*"), _launches, "our kernels were timed"),
    Key(
        ("simulator/unseen*/*.*", "simulator/schedules_*/*.*", "simulator/overlap/*.*"),
        _launches,
        "our kernels were timed or counted; a test simulates the rows again",
    ),
    Key(("timelines/*.stamps.csv",), _stamps, "our kernels wrote stamps; the hash stands in the file"),
    Key(
        ("microbench/microbench.csv", "microbench/sharing.csv", "microbench/launch_moves.csv"),
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
    Key(("atlas/*/atlas.json", "release-*/report.md"), _version, "the version that judged stands in it or in its name"),
    Key(("atlas/*/worst/*.json", "findings/0002_*.json"), _constant, "inputs to be judged again, no results"),
    Key(
        ("speed/host/*.csv", "speed/packed/*.csv", "speed/backward/*.csv", "speed/head_dims/*.csv", "tune/*.csv"),
        _none,
        "timed by scripts of a note, which kept no hash of the launches",
    ),
    Key(("model/model.json",), _forward, "a model ran on our forward; the hash stands in the file"),
    Key(("training/*.*",), _none, "a training run, which kept no hash of the launches"),
    Key(
        ("mutants/*.csv", "mutants/automatic.md", "hunt/curves.csv", "invariance/table.json"),
        _none,
        "searches among twins, which kept no hash of the twins and of the rules",
    ),
    Key(("findings/0006_low_lse.csv",), _constant, "gradients of libraries of a stated version, judged by float64"),
    Key(
        ("mutants/harness.*",),
        _none,
        "edits of the code as it stood, told apart by the edited lines",
    ),
    Key(
        ("findings/known.json", "claims.toml", "page.toml", "mutants/harness_survivors.toml"),
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
