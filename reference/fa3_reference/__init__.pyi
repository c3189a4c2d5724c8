from fa3_reference.attention import Attention, attention as truth
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.model import BackwardModel, KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3_reference.quantize import Quantized, QuantScheme, prepare

__all__ = [
    "Attention",
    "AttentionProblem",
    "BackwardModel",
    "Cache",
    "Descale",
    "ErrorBound",
    "KernelModel",
    "Operands",
    "QuantScheme",
    "Quantized",
    "SoftmaxOrder",
    "forward_bound",
    "prepare",
    "truth",
]
