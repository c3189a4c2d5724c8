"""The first output in which two results differ, and how many do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa3verify.operations import Outputs


@dataclass(frozen=True, slots=True)
class First:
    """Says where two results differ first.

    Parameters
    ----------
    output : str
    index : tuple of int
        In the order that the outputs have: of a batched out (sequence, row, head, channel).
    values, bits : (float, float), (str, str)
        Of both, the bits in hexadecimal.
    differing, compared : int
        Outputs of all names that differ, and that there are.
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
    """Compare the outputs that both have bit for bit; every NaN equals every NaN, -0 is not +0."""
    names = [name for name in a if name in b]
    masks = {name: _differs(a[name], b[name]) for name in names}
    for name in names:
        if masks[name].any():
            index = tuple(int(i) for i in np.argwhere(masks[name])[0])
            x = a[name].astype(np.float64)
            y = b[name].astype(np.float64)
            with np.errstate(invalid="ignore"):
                apart = np.where(masks[name], np.abs(x - y), 0.0)
            largest = float(np.max(np.where(np.isnan(apart), np.inf, apart)))
            counts = int(sum(mask.sum() for mask in masks.values())), size_of(a, b)
            words = tuple(f"{int(_bits(side[name])[index]):#0{2 + 2 * side[name].itemsize}x}" for side in (a, b))
            return First(name, index, (float(x[index]), float(y[index])), (words[0], words[1]), *counts, largest)
    return None


def size_of(a: Outputs, b: Outputs) -> int:
    """Return how many outputs both have."""
    return sum(int(a[name].size) for name in a if name in b)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"results must agree in dtype and shape, got {a.dtype} {a.shape} and {b.dtype} {b.shape}")
    return (_bits(a) != _bits(b)) & ~(np.isnan(a) & np.isnan(b))
