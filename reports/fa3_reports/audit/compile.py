"""Compile a kernel for sm_90a without a GPU, and report what ptxas made of it.

Needs torch and Triton. The calls are those of :mod:`fa3_reports.audit.calls`; on a GPU :mod:`fa3_kernels.gluon.run`
compiles the same kernels.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import create_function_from_signature

from fa3_kernels.audit.sass import run_tool
from fa3_kernels.gluon import quantize, run, surplus_barriers
from fa3_kernels.gluon.assembler import own_ptxas
from fa3_kernels.gluon.dependent import check_wait
from fa3_kernels.gluon.descriptors import DTYPES, block_layout
from fa3_kernels.gluon.run import FakeTensor
from fa3_kernels.plan.call import Pointer
from fa3_reports.audit.calls import Call, Descriptor

HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True)
class Compiled:
    """PTX, SASS, and ptxas' own figures: registers, spilled bytes, messages of serialised wgmma."""

    ptx: str
    sass: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    serialisation: tuple[str, ...]


def compile_call(call: Call) -> Compiled:
    """Compile the kernel of a call for Hopper and report on it; ValueError if ptxas or nvdisasm fails."""
    return _reported(build_call(call), call.options)


def build_call(call: Call) -> Any:
    """Compile the kernel of a call for Hopper and return what Triton keeps of it; RuntimeError as its checks say."""
    kernels = run.KERNELS | quantize.KERNELS
    built = _build(kernels[call.kernel], tuple(map(_as_compiled, call.arguments)), call.options)
    check_wait(call, built.asm["ptx"])
    return built


def _as_compiled(argument: Any) -> Any:
    """Return an argument of a call as the compiler reads it: with dtypes and blocks, but without an address."""
    if isinstance(argument, Pointer):
        return FakeTensor(DTYPES[argument.dtype])
    if isinstance(argument, np.ndarray):
        return torch.empty(argument.shape, dtype=getattr(torch, argument.dtype.name), device="meta")
    if isinstance(argument, Descriptor):
        base = torch.empty(1, dtype=getattr(torch, argument.dtype), device="meta")
        layout = block_layout(argument.block_shape, DTYPES[argument.dtype])
        shape, strides, block = (list(x) for x in (argument.shape, argument.strides, argument.block_shape))
        return TensorDescriptor(base, shape, strides, block, layout)
    return argument


def _build(kernel: Any, args: tuple, options: Mapping[str, int]) -> Any:
    """Compile a kernel as Triton does at a launch, up to its binary."""
    backend = make_backend(HOPPER)
    keywords = {"debug": False, **options}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, parsed = binder(*args, **keywords)
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, keywords, bound, specialization, parsed)
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constexprs, attributes)
    with surplus_barriers.left_out(), own_ptxas():
        compiled = triton.compile(source, target=HOPPER, options=parsed.__dict__)
    surplus_barriers.check(compiled.asm["ptx"])
    return compiled


def _reported(compiled: Any, options: Mapping[str, int]) -> Compiled:
    """Assemble a compiled kernel's PTX again, with the flags of its options, and report what the tools say."""
    fusion = () if options.get("enable_fp_fusion", True) else ("--fmad=false",)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        cubin = Path(folder, "kernel.cubin")
        source.write_text(compiled.asm["ptx"])
        messages = run_tool("ptxas", "-v", "--gpu-name=sm_90a", *fusion, source, "-o", cubin).stderr
        sass = run_tool("nvdisasm", "-c", cubin).stdout
    return Compiled(
        ptx=compiled.asm["ptx"],
        sass=sass,
        registers=int(re.findall(r"Used (\d+) registers", messages)[0]),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", messages))),
        smem_bytes=compiled.metadata.shared,
        serialisation=tuple(line for line in messages.splitlines() if "C75" in line),
    )
