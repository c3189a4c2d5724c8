"""The truth: problem definition, float64 attention and gradients, number formats, quantisers, bounds.

Users may import the names of this module; each is imported when it is first asked for. Nothing here imports the
kernels, the simulator or the verifier.

>>> import fa3_reference
>>> fa3_reference.AttentionProblem(1, nheads=2, nheads_kv=1, seqlen_q=8, seqlen_k=8, head_dim=64).q_shape
(1, 8, 2, 64)
"""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from fa3_reference.attention import Attention, attention as truth
    from fa3_reference.bounds.forward import ErrorBound, forward_bound
    from fa3_reference.bounds.model import BackwardModel, KernelModel
    from fa3_reference.bounds.order import SoftmaxOrder
    from fa3_reference.cache import Cache
    from fa3_reference.problem import AttentionProblem, Descale, Operands
    from fa3_reference.quantize import Quantized, QuantScheme, prepare
else:
    from fa3_reference.lazy import exporter

    __getattr__, __dir__ = exporter(
        __name__,
        {
            "Attention": "fa3_reference.attention",
            "AttentionProblem": "fa3_reference.problem",
            "BackwardModel": "fa3_reference.bounds.model",
            "Cache": "fa3_reference.cache",
            "Descale": "fa3_reference.problem",
            "ErrorBound": "fa3_reference.bounds.forward",
            "KernelModel": "fa3_reference.bounds.model",
            "Operands": "fa3_reference.problem",
            "QuantScheme": "fa3_reference.quantize",
            "Quantized": "fa3_reference.quantize",
            "SoftmaxOrder": "fa3_reference.bounds.order",
            "forward_bound": "fa3_reference.bounds.forward",
            "prepare": "fa3_reference.quantize",
            "truth": "fa3_reference.attention:attention",
        },
    )
