"""Edits: changes of single elements, rows or channels, which a recipe applies after its distribution was drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.inputs.draws import Arrays
from fa3verify.inputs.streams import Tensor

EditKind = Literal["set", "scale_row", "scale_channel", "constant_row", "copy_row", "needle"]


def natural(owner: str, name: str, value: object) -> int:
    """Return a value that is an integer of 0 or more; ValueError for any other."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{owner}: {name} must be an integer >= 0, got {value!r}")
    return value


# The fields that each kind uses, and so those that its JSON has.
_EDIT_FIELDS: dict[EditKind, tuple[str, ...]] = {
    "set": ("batch", "pos", "head", "channel", "value"),
    "scale_row": ("batch", "pos", "head", "value"),
    "scale_channel": ("batch", "head", "channel", "value"),
    "constant_row": ("batch", "pos", "head", "value"),
    "copy_row": ("batch", "pos", "head", "source"),
    "needle": ("batch", "pos", "head", "source", "value"),
}


@dataclass(frozen=True, slots=True)
class Edit:
    """One change to the drawn arrays, at (batch, pos, head, channel) of a tensor.

    ``set`` sets an element to ``value``. ``scale_row`` and ``scale_channel`` multiply a row, or a channel in every row,
    by ``value``. ``constant_row`` sets all channels of a row. ``copy_row`` copies row ``source`` of the same head,
    which makes a tie. ``needle`` points query row ``pos`` at key ``source``, so that its scaled score before any
    softcap is ``value``. Fields that a kind does not use must be 0.

    Parameters
    ----------
    kind : {"set", "scale_row", "scale_channel", "constant_row", "copy_row", "needle"}
        What is done.
    tensor : {"q", "k", "v"}
        The array that is changed; a needle changes q.
    batch, pos, head, channel : int
        Sequence, row in the sequence, head of the tensor, and channel, each from 0.
    source : int
        Row that is copied, or the key at which a needle points.
    value : float
        Number, factor or score; NaN and infinities are legal.

    Raises
    ------
    ValueError
        For an unknown kind or tensor, a field that the kind does not use, or a number of the wrong type.
    """

    kind: EditKind
    tensor: Tensor
    batch: int = 0
    pos: int = 0
    head: int = 0
    channel: int = 0
    source: int = 0
    value: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.kind in get_args(EditKind),
            f"edit kind must be one of {', '.join(get_args(EditKind))}, got {self.kind!r}",
        )
        tensors = ("q",) if self.kind == "needle" else get_args(Tensor)
        require(
            self.tensor in tensors, f"edit {self.kind}: tensor must be in {', '.join(tensors)}, got {self.tensor!r}"
        )
        used = _EDIT_FIELDS[self.kind]
        for name in ("batch", "pos", "head", "channel", "source"):
            natural(f"edit {self.kind}", name, getattr(self, name))
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise ValueError(f"edit {self.kind}: value must be a number, got {self.value!r}")
        require(
            not isinstance(self.value, int) or abs(self.value) <= 2**1000,
            f"edit {self.kind}: value must fit float64, got an integer above 2^1000",
        )
        object.__setattr__(self, "value", float(self.value))
        for name in ("pos", "channel", "source", "value"):
            if name not in used and (got := getattr(self, name)) != 0:
                raise ValueError(f"edit {self.kind}: {name} is not used and must be 0, got {got!r}")

    def apply(self, problem: AttentionProblem, arrays: Arrays) -> None:
        """Change the arrays in place.

        Parameters
        ----------
        problem : AttentionProblem
            What the arrays are for.
        arrays : tuple of float64 arrays
            The arrays q, k and v in the problem's shapes.

        Raises
        ------
        ValueError
            If a position lies outside the problem.
        """
        x = arrays["qkv".index(self.tensor)]
        self._check("batch", problem.batch)
        seq = list(problem.sequences())[self.batch]
        view = (problem.rows_q if self.tensor == "q" else problem.rows_k)(x, seq)  # (seqlen, heads, dim)
        self._check("head", view.shape[1])
        rows = view[:, self.head]
        if self.kind != "scale_channel":
            self._check("pos", len(rows))
        self._check("channel", rows.shape[1])
        if self.kind in ("set", "constant_row"):
            rows[(self.pos, self.channel) if self.kind == "set" else self.pos] = self.value
        elif self.kind in ("scale_row", "scale_channel"):
            rows[self.pos if self.kind == "scale_row" else (slice(None), self.channel)] *= self.value
        elif self.kind == "copy_row":
            self._check("source", len(rows))
            rows[self.pos] = rows[self.source]
        else:
            self._check("source", seq.seqlen_k)
            key = problem.rows_k(arrays[1], seq)[self.source, self.head // problem.group]
            energy = math.fsum(float(c) * float(c) for c in key) * problem.softmax_scale
            rows[self.pos] = key * (self.value / energy) if energy else 0.0

    def _check(self, name: str, size: int) -> None:
        if getattr(self, name) >= size:
            raise ValueError(f"edit {self.describe()}: {name} must be below {size} in this problem")

    def describe(self) -> str:
        """Return one readable phrase.

        Returns
        -------
        str
            Kind, tensor and the fields that are used.

        Examples
        --------
        >>> Edit("scale_row", "k", pos=5, head=1, value=16).describe()
        'scale_row k(batch=0, pos=5, head=1, value=16.0)'
        """
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _EDIT_FIELDS[self.kind])
        return f"{self.kind} {self.tensor}({fields})"

    def to_json(self) -> dict[str, object]:
        """Return the used fields as JSON types.

        Returns
        -------
        dict of str to object
            By name; a NaN or infinite value becomes "nan", "inf" or "-inf".
        """
        names = ("kind", "tensor", *_EDIT_FIELDS[self.kind])
        record: dict[str, object] = {name: getattr(self, name) for name in names}
        return record if math.isfinite(self.value) else {**record, "value": repr(self.value)}

    @classmethod
    def from_json(cls, record: object) -> Edit:
        """Read what :meth:`to_json` wrote.

        Parameters
        ----------
        record : object
            Decoded JSON.

        Returns
        -------
        Edit
            An equal edit.

        Raises
        ------
        ValueError
            For anything else, in one line.
        """
        kinds = get_args(EditKind)
        if not isinstance(record, dict) or record.get("kind") not in kinds:
            raise ValueError(f"edit must be an object whose kind is one of {', '.join(kinds)}, got {record!r}")
        exact_keys("edit", record, ("kind", "tensor", *_EDIT_FIELDS[record["kind"]]))
        value = record.get("value", 0.0)
        return cls(**{**record, "value": float(value) if value in ("nan", "inf", "-inf") else value})


def exact_keys(owner: str, record: Mapping[str, object], keys: tuple[str, ...]) -> None:
    """Raise ValueError unless a record has these keys and no others."""
    missing = [k for k in keys if k not in record]
    unknown = [k for k in record if k not in keys]
    if missing or unknown:
        what = f"missing key {missing[0]!r}" if missing else f"unknown key {unknown[0]!r}"
        raise ValueError(f"{owner}: {what} (legal: {', '.join(keys)})")
