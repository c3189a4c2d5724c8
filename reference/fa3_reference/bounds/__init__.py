"""Error bounds: what the machine does, step by step, up to whole kernels.

The models of kernels alone are imported at once, as plans of launches read them; the bounds load numba.
"""

from typing import TYPE_CHECKING

from fa3_reference.bounds.model import BackwardModel, KernelModel
from fa3_reference.bounds.order import SoftmaxOrder

__all__ = [
    "BackwardBound",
    "BackwardModel",
    "Enclosure",
    "ErrorBound",
    "KernelModel",
    "SoftmaxOrder",
    "backward_bound",
    "forward_bound",
    "forward_enclosure",
]

if TYPE_CHECKING:
    from fa3_reference.bounds.backward import BackwardBound, backward_bound
    from fa3_reference.bounds.enclosure import Enclosure, forward_enclosure
    from fa3_reference.bounds.forward import ErrorBound, forward_bound
else:
    from fa3_reference.lazy import exporter

    __getattr__ = exporter(
        __name__,
        {
            "BackwardBound": "fa3_reference.bounds.backward",
            "Enclosure": "fa3_reference.bounds.enclosure",
            "ErrorBound": "fa3_reference.bounds.forward",
            "backward_bound": "fa3_reference.bounds.backward",
            "forward_bound": "fa3_reference.bounds.forward",
            "forward_enclosure": "fa3_reference.bounds.enclosure",
        },
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
