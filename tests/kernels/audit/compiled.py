"""Kernels that no plan launches, compiled as those of a plan are."""

from __future__ import annotations

from typing import Any

from fa3_reports.audit.compile import Compiled, _build, _reported


def compile_kernel(kernel: Any, args: tuple, **options: Any) -> Compiled:
    """Compile a Gluon kernel for Hopper.

    Parameters
    ----------
    kernel : gluon.jit function
    args : tuple
        As for a launch, with :class:`FakeTensor` for tensors.
    **options
        Launch options: num_warps, maxnreg, enable_fp_fusion.
    """
    return _reported(_build(kernel, args, options), options)
