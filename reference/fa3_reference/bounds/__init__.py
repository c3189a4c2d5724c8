"""Error bounds: what the machine does, step by step, up to whole kernels.

Here are the models of kernels alone, which plans of launches read; the bounds themselves load numba.
"""

from fa3_reference.bounds.model import KernelModel, SoftmaxOrder

__all__ = ["KernelModel", "SoftmaxOrder"]
