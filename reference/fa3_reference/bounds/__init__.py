"""A-priori rounding-error bounds: what the machine does, step by step, up to whole kernels."""

from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.model import KernelModel, SoftmaxOrder

__all__ = ["ErrorBound", "KernelModel", "SoftmaxOrder", "forward_bound"]
