"""Compare two results bit for bit: the first output that differs, and how many do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa3verify.operations import Outputs
from fa3verify.properties.compare import bits_of, other_bits


@dataclass(frozen=True, slots=True)
class First:
    """Says where two results differ first.

    Parameters
    ----------
    output : str
    index : tuple of int
        Place in the array; in a batched out (sequence, row, head, channel).
    values, bits : (float, float), (str, str)
        The value in both results, and its bits in hexadecimal.
    differing, compared : int
        How many elements of all outputs differ, and how many were compared.
    largest : float
        Largest |a - b| of this output; infinite where one is NaN.
    """

    output: str
    index: tuple[int, ...]
    values: tuple[float, float]
    bits: tuple[str, str]
    differing: int
    compared: int
    largest: float

    def told(self) -> str:
        """One line: place, values, bits, and how many differ by how much.

        >>> First("out", (0, 3), (1.0, 1.5), ("0x3c00", "0x3e00"), 1, 8, 0.5).told()
        'out[0, 3] 1.0 (0x3c00) against 1.5 (0x3e00); 1 of 8 differ, by 0.5 at most'
        """
        (a, b), (x, y) = self.values, self.bits
        counts = f"{self.differing:,} of {self.compared:,} differ, by {self.largest:.3g} at most"
        return f"{self.output}{list(self.index)} {a!r} ({x}) against {b!r} ({y}); {counts}"


def first_difference(a: Outputs, b: Outputs) -> First | None:
    """Compare the outputs that both results have bit for bit; None if all are equal.

    Every NaN equals every NaN, -0 is not +0. ValueError for arrays of other dtypes or shapes.
    """
    names = [name for name in a if name in b]
    for name in names:
        if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
            kinds = " and ".join(f"{x[name].dtype} {x[name].shape}" for x in (a, b))
            raise ValueError(f"results must agree in dtype and shape, got {kinds}")
    masks = {name: other_bits(a[name], b[name]) for name in names}
    name = next((name for name in names if masks[name].any()), None)
    if name is None:
        return None
    index = tuple(int(i) for i in np.argwhere(masks[name])[0])
    x, y = (side[name].astype(np.float64) for side in (a, b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(x - y)[masks[name]]
    words = tuple(f"{int(bits_of(side[name])[index]):#0{2 + 2 * side[name].itemsize}x}" for side in (a, b))
    return First(
        output=name,
        index=index,
        values=(float(x[index]), float(y[index])),
        bits=(words[0], words[1]),
        differing=int(sum(mask.sum() for mask in masks.values())),
        compared=size_of(a, b),
        largest=float(np.max(np.where(np.isnan(apart), np.inf, apart))),
    )


def size_of(a: Outputs, b: Outputs) -> int:
    """Return how many outputs both have."""
    return sum(int(a[name].size) for name in a if name in b)
