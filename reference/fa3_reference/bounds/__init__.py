"""Error bounds: how far rounding may take a kernel from the truth, from single operations up to whole calls.

Plans of launches import this package for the models of kernels, so these are imported at once. The bounds load numba
and are imported when they are first asked for.
"""

from fa3_reference.bounds.model import BackwardModel as BackwardModel, KernelModel as KernelModel
from fa3_reference.bounds.order import SoftmaxOrder as SoftmaxOrder
from fa3_reference.bounds.quantises import Quantises as Quantises
from fa3_reference.lazy import exporter

__getattr__, __dir__ = exporter(__name__)
