"""FlashAttention-4 on SM90, from kernels that its package compiled elsewhere, without a GPU.

The package's object cache holds a kernel as a host object with the device code in it. To run such an object only the
runtime library of the CuTe DSL is needed, not the compiler of 240 MB. The folder ``flash4`` in the peers' folder holds
that library, and a shared library for each kind of launch, called through the package ``tvm_ffi``: ``fwd``, ``plain``
(a forward without the lse), and ``pre``, ``bwd`` and ``post``, which make up a backward. docs/libraries.md says how
they are made.

On an H200 all kinds are right at 300, 512 and 4096 keys and run in CUDA graphs. Forward: relative error 2.4e-4 to
2.9e-4 in fp16, 1.9e-3 to 2.3e-3 in bf16, lse within 2.2e-6, bits that repeat, the same without the lse. Backward:
2.7e-4 to 3.1e-4 in fp16, the bits of dK and dV repeat, those of dQ do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.known.launches import Backward, Forward, Given, GivenBackward, Gradients, Launch, LaunchOutput, Options
from fa3verify.known.libraries import library
from fa3verify.known.peers import FLASH4_RUNTIME, flash4_refuses

FOLDER = "flash4"
# By head_dim the query rows of a tile of the backward, dense and causal (_tile_size_bwd_sm90 of the package). Scratch
# is padded to a multiple of them.
TILE_M = {64: (128, 128), 128: (80, 64), 256: (64, 64)}
_TYPES = {"fp16": "float16", "bf16": "bfloat16"}
# The last 12 arguments of a forward, in the order in which _flash_attn_fwd of the package's interface.py calls a kernel
# for SM90: cu_seqlens_q and _k, seqused_q and _k, page_table, window_size_left and _right, learnable_sink, sparsity, a
# pair (AuxData), and two sums of tiles for packed sequences. In _flash_attn_bwd, too, 12 arguments follow the scale:
# nine, the pair, and two.
_NO_EXTRAS = (*(None,) * 9, (None, None), *(None,) * 2)


@cache
def _load(name: str) -> Any:
    """Return the host function of one file; Unsupported without the file or the runtime library."""
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    ctypes.CDLL(str(library(FLASH4_RUNTIME)), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(library(f"{FOLDER}/{name}"))).func


def _functions(problem: AttentionProblem, *kinds: str) -> list[Any]:
    """Return the functions of these kinds for a problem; ValueError for a problem that none was compiled for."""
    if rule := flash4_refuses(problem):
        raise ValueError(rule)
    rest = f"{_TYPES[problem.dtype]}_{problem.head_dim}_{'causal' if problem.causal else 'dense'}.so"
    return [_load(f"{kind}_{rest}") for kind in kinds]


def load(name: str) -> Forward:
    """Return the forward, of batches of one length; Unsupported without the runtime library of the kernels.

    ``name`` is not used: :func:`fa3verify.known.launches.loaded` gives it to the ``load`` of every library. Preparing a
    launch raises ValueError for an option other than ``lse`` (whether lse is returned; true by default) and for a
    problem that no kernel was compiled for, and Unsupported where the file of its kernel is missing.
    """
    library(FLASH4_RUNTIME)

    def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
        require(options.keys() <= {"lse"}, "compiled without options")
        wants_lse = options.get("lse", True)
        (function,) = _functions(problem, "fwd" if wants_lse else "plain")
        q, k, v = given[:3]
        out = q.new_empty(problem.out_shape)
        lse = q.new_empty(problem.lse_shape).float() if wants_lse else None  # float32 beside operands in 16 bits

        def launch() -> LaunchOutput:
            function(q, k, v, out, lse, problem.softmax_scale, *_NO_EXTRAS)
            return LaunchOutput(out, lse)

        return launch

    return prepare


def load_backward(name: str) -> Backward:
    """Return the backward: batches of one length, without options."""
    return prepare_backward


def prepare_backward(problem: AttentionProblem, x: GivenBackward, options: Options) -> Callable[[], Gradients]:
    """Return what launches the three kernels; its result is dq, dk and dv, the same tensors at every call.

    Raises
    ------
    ValueError
        For what no kernel was compiled for.
    Unsupported
        Without the files.
    """
    require(not options, "compiled without options")
    pre, main, post = _functions(problem, "pre", "bwd", "post")
    p = problem
    tile_m = TILE_M[p.head_dim][p.causal]
    rows = -(-p.seqlen_q // tile_m) * tile_m
    dq, dk, dv = (y.new_empty(y.shape) for y in (x.q, x.k, x.v))
    dots, lse_log2 = (x.lse.new_empty(p.batch, p.nheads, rows) for _ in range(2))
    sums = x.lse.new_empty(p.batch, p.nheads, rows * p.head_dim)
    nothing = (None,) * 5

    def launch() -> Gradients:
        pre(x.out, x.dout, dots, x.lse, lse_log2, sums, *nothing, 1.0, None, None)  # a scale of another mode
        main(x.q, x.k, x.v, x.dout, lse_log2, dots, sums, dk, dv, p.softmax_scale, *_NO_EXTRAS)
        post(sums, dq, p.softmax_scale, *nothing[:4])
        return dq, dk, dv

    return launch
