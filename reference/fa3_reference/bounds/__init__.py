"""Error bounds: how far rounding may take a kernel from the truth, from single operations up to whole calls.

Plans of launches import this package for the models of kernels, so these are imported at once. The bounds load numba
and are imported when they are first asked for.
"""

from typing import TYPE_CHECKING

from fa3_reference.bounds.model import BackwardModel, KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.bounds.quantises import Quantises

__all__ = [
    "BackwardBound",
    "BackwardModel",
    "Enclosure",
    "ErrorBound",
    "KernelModel",
    "Quantises",
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

    __getattr__, __dir__ = exporter(
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
