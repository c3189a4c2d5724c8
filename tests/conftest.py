"""What tests of many kernels share."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fa3verify.operations import OPERATIONS


@pytest.fixture(scope="module")
def shared_references() -> Iterator[None]:
    """Truth, bound and enclosure are computed once for the kernels of a module that see the same operands.

    They are functions of a problem, of the values of its operands and of the assumed order, all of which are the key.
    Nobody may write into them. Operations that judge choices of a kernel are left alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        for operation in OPERATIONS.values():
            for name in () if operation.judges_choices else ("truth", "bound", "enclosure"):
                patch.setattr(type(operation), name, _once(getattr(type(operation), name)))
        yield


def _once(method: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[bytes, Any] = {}

    def shared(self: Any, problem: Any, values: Any, assumed: Any, *got: Any) -> Any:
        key = hashlib.sha256(pickle.dumps((problem, values, assumed))).digest()
        if key not in known:
            known[key] = method(self, problem, values, assumed, *got)
            for found in known[key].values():
                for array in found if isinstance(found, tuple) else (found,):
                    if isinstance(array, np.ndarray):
                        array.flags.writeable = False
        return known[key]

    return shared
