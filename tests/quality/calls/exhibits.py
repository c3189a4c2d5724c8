"""How the kernels of this folder are declared and kept: by class, with words and with a call that shows the mistake."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fa3verify
from fa3_reference.formats import FORMATS

DENSE = ("causal", "gqa")
PAGES = ("causal", "gqa", "paged")
ROWS = ("causal", "gqa", "seqused_k")


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A kernel of the museum.

    Parameters
    ----------
    kind : str
        The class of the mistake, or "right".
    words : str
        What is wrong, or what is unusual.
    function : callable
        The kernel, which its module has under its name.
    facts : dict
        What it declares.
    witness : callable, optional
        Takes the exhibit, and tells whether it was seen to be wrong.
    nightly : bool
        Whether the witness takes long.
    """

    kind: str
    words: str
    function: Callable[..., Any]
    facts: dict[str, Any]
    witness: Callable[[Exhibit], bool] | None = None
    nightly: bool = False

    @property
    def reference(self) -> str:
        """Return its name as the command takes it."""
        return f"{self.function.__module__}:{self.function.__name__}"

    def called(self, *arrays: Any, **options: Any) -> Any:
        """Call it on arrays of numpy, which a kernel of torch gets as tensors over the same memory."""
        if self.facts["library"] == "numpy":
            return self.function(*arrays, **options)
        from fa3verify.tensors.convert import to_numpy

        given = {name: _tensor(x) for name, x in options.items()}
        returned = self.function(*map(_tensor, arrays), **given)
        return tuple(to_numpy(x) for x in (returned if isinstance(returned, tuple) else (returned,)))


def _tensor(x: Any) -> Any:
    """Return a tensor over the very memory of an array, with its strides; other arguments as they are."""
    import torch

    from fa3verify.tensors.convert import TORCH_DTYPES

    if not isinstance(x, np.ndarray):
        return x
    if x.dtype in (np.int32, np.int64, np.float32):
        return torch.from_numpy(x)
    named = {np.dtype(FORMATS[name].dtype): dtype for name, dtype in TORCH_DTYPES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only arrays
        return torch.from_numpy(x.view(np.int16 if x.itemsize == 2 else np.uint8)).view(named[x.dtype])


EXHIBITS: dict[str, Exhibit] = {}


def wrong(
    kind: str,
    words: str,
    witness: Callable[[Exhibit], bool],
    *,
    features: Iterable[str] = DENSE,
    dtypes: tuple[Any, ...] = ("fp16",),
    library: Any = "numpy",
    nightly: bool = False,
    **facts: Any,
) -> Callable[[Callable], Callable]:
    """Declare a wrong kernel of arrays (batch, seqlen, heads, head_dim) and the call that shows that it is wrong."""
    given = {"layout": "bshd", "features": tuple(features), "dtypes": dtypes, "library": library} | facts

    def declare(function: Callable) -> Callable:
        assert function.__name__ not in EXHIBITS, function.__name__
        EXHIBITS[function.__name__] = Exhibit(kind, words, function, given, witness, nightly)
        return fa3verify.kernel(**given)(function)

    return declare


def right(words: str, *features: str, dtypes: tuple[Any, ...] = ("fp16",), library: Any = "numpy", **facts: Any):
    """Declare a right kernel that is unusual; causal masks and grouped heads unless it names its features."""
    given = {"layout": "bshd", "features": features or DENSE, "dtypes": dtypes, "library": library} | facts

    def declare(function: Callable) -> Callable:
        assert function.__name__ not in EXHIBITS, function.__name__
        EXHIBITS[function.__name__] = Exhibit("right", words, function, given)
        return fa3verify.kernel(**given)(function)

    return declare


def named(space: dict[str, Any], function: Callable, name: str) -> Callable:
    """Give a function that another one made a name of its module, so that any process can load it."""
    function.__name__ = function.__qualname__ = name
    function.__module__ = space["__name__"]
    space[name] = function
    return function


def drawn(low: int, high: int, seed: int) -> int:
    """Return a size whose logarithm is uniform between those of two others."""
    return int(np.exp(np.random.default_rng(seed).uniform(np.log(low), np.log(high))))
