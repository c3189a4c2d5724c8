"""A folder of cases that another program fills in: operands as plain files, and a kernel that looks its outputs up.

``fa3verify cases`` writes it (:mod:`fa3verify.commands.cases`), any program fills it, and ``fa3verify check`` judges it
by the campaign that was written. A case is named by a hash of all that its call hands over, so that no file and no line
can stand for another one. docs/cases.md describes the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fa3_reference.formats import BY_DTYPE, FORMATS
from fa3verify.files import Json, parsed
from fa3verify.kernels.conventions import facts_of
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.record import Kernel, Unfilled
from fa3verify.operations import WrongOutput
from fa3verify.version import __version__

DECLARED = "declared.json"
CASES = "cases.jsonl"
# Another release may draw other cases, and another numpy other numbers.
SCHEMA = f"fa3verify.cases/1, fa3verify {__version__}, numpy {np.__version__}"
# Properties of how a call is made, which files do not keep: strides, addresses, switches, and calls before it; and of
# sizes that are asked for as long as there is time, which no folder could hold.
_UNASKED = frozenset(
    [
        "views_are_read_by_their_strides",
        "nothing_else_is_read",
        "every_index_is_read_where_it_lies",
        "calls_leave_no_trace",
        "numeric_switches_stay_within_bound",
    ]
)


class CaseFolder:
    """A folder of cases, as it is when this is made.

    Parameters
    ----------
    path : Path
        Where ``declared.json`` and ``cases.jsonl`` are: what the program is declared to take and which campaign was
        written, and a line of each case.
    contract : mapping of str to str, optional
        What the name of its kernel declares, where a campaign asks for it. Under another contract than the folder's
        own, other calls may be drawn: those that are not there say nothing then.

    Raises
    ------
    ValueError
        If the declaration is damaged, or of another release of fa3verify or numpy.
    OSError
        If a file is not there.
    """

    def __init__(self, path: Path, contract: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.declared = parsed((path / DECLARED).read_bytes(), SCHEMA, f"{path / DECLARED}")
        self.is_own = contract in (None, KernelName.parse(self.name).contract)
        self.lines = frozenset((path / CASES).read_text(encoding="utf-8").splitlines())

    @property
    def name(self) -> str:
        """Return the name by which a campaign finds its kernel, with all that is declared."""
        return f"{self.path / CASES}:{self.declared['like']}{self.declared['said']}"

    def kernel(self) -> Kernel:
        """Return the program that fills it, as a kernel; ValueError for a misspelt declaration."""
        facts: Any = facts_of(self.declared["like"], self.answer) | {
            "library": "numpy",
            "dtypes": (self.declared["dtype"],),
            "accumulator": self.declared["accumulator"] or (None if self.declared["dtype"] == "fp32" else "either"),
        }
        (kernel,) = array_kernel(self.answer, **facts)
        filled = [q.with_name("out.bin").exists() for q in self.path.glob("*/q.bin")]
        lacking = f"{filled.count(False):,} of {len(filled):,} cases are not filled in" if False in filled else ""
        return replace(kernel, unasked=_UNASKED, lacking=lacking)

    def case(
        self, arrays: tuple[np.ndarray, ...], options: Json
    ) -> tuple[Json, dict[str, bytes], dict[str, np.ndarray]]:
        """Return what ``cases.jsonl`` has of a call, its operands, and arrays like the outputs that are due."""
        names = ("q", "k_cache", "v_cache") if "cache_seqlens" in options else ("q", "k", "v")
        given = dict(zip(names, arrays, strict=True)) | {name: x for name, x in options.items() if x is not None}
        contents = {name: x.tobytes() for name, x in given.items() if isinstance(x, np.ndarray)}
        q = arrays[0]
        dtype = FORMATS["bf16"].dtype if q.itemsize == 1 else q.dtype
        is_by_head = q.ndim == 4 and "layout" not in facts_of(self.declared["like"], self.answer)
        rows = q.shape[:-1] if is_by_head else q[..., 0].swapaxes(-1, -2).shape
        due = {"out": np.empty((*q.shape[:-1], arrays[2].shape[-1]), dtype), "lse": np.empty(rows, np.float32)}
        said = {name: _said(x) if isinstance(x, np.ndarray) else x for name, x in (given | due).items()}
        head = json.dumps([self.declared, said]).encode()
        return {"case": hashlib.sha256(b"".join([head, *contents.values()])).hexdigest()[:16], **said}, contents, due

    def answer(self, *arrays: np.ndarray, **options: Any) -> tuple[Any, ...]:
        """Return out and lse that were filled in for a call; lse may be None.

        Raises
        ------
        Unfilled
            If the program has written no out.
        LookupError
            If ``cases.jsonl`` has no such line; under another contract than the folder's own, Unfilled.
        WrongOutput
            For a file of another size, and for an operand that was changed.
        """
        said, operands, due = self.case(arrays, options)
        own = self.path / said["case"]
        if json.dumps(said) not in self.lines:
            missing = f"{self.path / CASES} has no line of case {said['case']} as it was written"
            raise LookupError(missing) if self.is_own else Unfilled(missing)
        if changed := [name for name, x in operands.items() if (own / f"{name}.bin").read_bytes() != x]:
            raise WrongOutput(f"{own} has another {changed[0]} than was written")
        out, lse = (_output(own / f"{name}.bin", x) for name, x in due.items())
        if out is None:
            raise Unfilled(f"{own / 'out.bin'} is not filled in")
        return out, lse


def _said(x: np.ndarray) -> str:
    """Return a tensor in words that a program splits at spaces: its format, then its sizes."""
    return " ".join([BY_DTYPE[x.dtype].name if x.dtype in BY_DTYPE else x.dtype.name, *map(str, x.shape)])


def _output(file: Path, due: np.ndarray) -> np.ndarray | None:
    """Return what a program wrote of an output; None where it wrote nothing."""
    if not file.exists():
        return None
    if (size := file.stat().st_size) != due.nbytes:
        raise WrongOutput(f"{file} has {size:,} bytes, and {_said(due)} are {due.nbytes:,}")
    return np.fromfile(file, due.dtype).reshape(due.shape)
