from fa3_reference.bounds.backward import BackwardBound, backward_bound
from fa3_reference.bounds.enclosure import Enclosure, forward_enclosure
from fa3_reference.bounds.forward import ErrorBound, forward_bound
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
