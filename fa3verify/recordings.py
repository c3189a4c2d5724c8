"""Recordings: what a released kernel returned on a GPU, kept so that its twin can be held against it anywhere.

A recording names the library, its version and the hash of its binary; each case says how its operands are drawn and
keeps one digest of O and one of LSE for every sequence and head, so that a difference is located. Nothing of it needs
a GPU, torch or the library.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.cases import Case

SCHEMA = "fa3verify.recording/1"
DIGEST_BYTES = 8


class Digests(NamedTuple):
    """Hexadecimal digests of O and LSE, one per sequence and head, sequence by sequence."""

    out: tuple[str, ...]
    lse: tuple[str, ...]


NONE = Digests((), ())


@dataclass(frozen=True, slots=True)
class Recorded:
    """One launch: its case, a digest of its operands and those of its outputs.

    ``case.changes`` are the options that the library was called with, such as num_splits, where 0 is the library's own
    choice; ``error`` is what it raised instead of returning.
    """

    case: Case
    operands: str
    digests: Digests = NONE
    error: str = ""

    @property
    def outputs(self) -> int:
        """Elements of O."""
        return int(np.prod(self.case.problem.out_shape))


@dataclass(frozen=True, slots=True)
class Recording:
    """Launches of one library on one GPU; ``facts`` are its provenance."""

    library: str
    facts: dict[str, Any] = field(default_factory=dict)
    launches: tuple[Recorded, ...] = ()


def _digest(*arrays: np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for x in arrays:
        found.update(x.tobytes())
    return found.hexdigest()


def digest_of_operands(operands: Operands) -> str:
    """Digest of q, k and v and of their descales."""
    descales = (operands.q_descale, operands.k_descale, operands.v_descale)
    return _digest(operands.q, operands.k, operands.v, *(x.values for x in descales if x is not None))


def digests_of(problem: AttentionProblem, out: np.ndarray, lse: np.ndarray) -> Digests:
    """Digest O and LSE of every sequence and head, bit for bit."""
    by_out, by_lse = [], []
    for seq in problem.sequences():
        rows, sums = problem.rows_q(out, seq), problem.rows_lse(lse, seq)
        by_out += [_digest(rows[:, head]) for head in range(problem.nheads)]
        by_lse += [_digest(sums[head]) for head in range(problem.nheads)]
    return Digests(tuple(by_out), tuple(by_lse))


def _to_json(launch: Recorded) -> dict[str, Any]:
    digests = {name: " ".join(values) for name, values in launch.digests._asdict().items()}
    found = {"case": launch.case.to_json(), "operands": launch.operands, **digests}
    return found | ({"error": launch.error} if launch.error else {})


def _of_json(values: dict[str, Any]) -> Recorded:
    digests = Digests(tuple(values["out"].split()), tuple(values["lse"].split()))
    return Recorded(Case.from_json(values["case"]), values["operands"], digests, values.get("error", ""))


def write(path: Path, recording: Recording) -> None:
    """Write a recording, compressed."""
    lines = [json.dumps({"schema": SCHEMA, "library": recording.library, "facts": recording.facts})]
    lines += [json.dumps(_to_json(launch)) for launch in recording.launches]
    path.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9))


def read(path: Path) -> Recording:
    """Read a recording; ValueError for a file that is damaged or foreign."""
    try:
        head, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        facts = json.loads(head)
        if facts.get("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA!r}, got {facts.get('schema')!r}")
        return Recording(facts["library"], facts["facts"], tuple(_of_json(json.loads(line)) for line in lines))
    except (lzma.LZMAError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} is not a recording: {error}") from error
