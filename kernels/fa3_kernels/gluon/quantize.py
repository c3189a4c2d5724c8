"""Host side of the quantiser: it checks the tensors, makes the buffers, and starts the kernels.

Users call :func:`quantize_qkv`; the audit compiles the calls of :func:`plan_quantize` without a GPU. What may be asked
for stands in :mod:`fa3_kernels.plan.quantizer`, the kernels in :mod:`fa3_kernels.gluon.quantize_kernel` and
:mod:`fa3_kernels.gluon.quantize_mean`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch

from fa3_kernels.gluon.assembler import assembled_by_own_ptxas
from fa3_kernels.gluon.quantize_kernel import SCALES, Correction, QuantizedOperand, quantize
from fa3_kernels.gluon.quantize_mean import k_mean, k_mean_chunks
from fa3_kernels.plan.call import Call
from fa3_kernels.plan.quantizer import (
    MEAN_CHUNK_ROWS,
    MEAN_FINAL_ROWS,
    MEAN_TREE_ROWS,
    QuantizeOptions,
    Scale,
    Scope,
    check_shapes,
    lse_factor,
    padded_head_dim,
    tile_form,
    tile_rows,
)
from fa3_reference.rules import require
from fa3_reference.scales import SHARING

MEAN_WARPS = 4
REGISTERS_PER_SM = 65536
KERNELS: dict[str, Any] = {
    "k_mean_chunks": assembled_by_own_ptxas(k_mean_chunks),
    "k_mean": assembled_by_own_ptxas(k_mean),
    "quantize": assembled_by_own_ptxas(quantize),
}


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """e4m3 operands and what an attention kernel needs to undo the scaling.

    ``q``, ``k``, ``v`` are float8_e4m3fn, contiguous, shaped like the inputs; ``*_descale`` float32 (batch, heads,
    blocks) with ``block_rows`` rows each (0: the whole sequence). ``lse_correction`` is float32 (batch, nheads,
    seqlen_q) or (nheads, total_q), to be added to the kernel's lse, or None. ``k_mean`` is float32 (batch, nheads_kv,
    head_dim) or None. Those of :class:`fa3_kernels.twin.quantize.QuantizedQKV` are the same in numpy.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    block_rows: tuple[int, int, int]
    lse_correction: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: tuple, max_seqlens: tuple) -> None:
    """Raise ValueError for tensors that the kernels cannot read, with the rule that the first one breaks."""
    tensors = (q, k, v)
    is_packed = q.dim() == 3
    filled = [x for x in tensors if x.numel()]  # the strides of an empty tensor mean nothing
    is_aligned = all(x.data_ptr() % 16 == 0 and not any(n % 16 for n in x.stride()[:-1]) for x in filled)
    rules = (
        (all(x.is_cuda and x.device == q.device for x in tensors), "q, k and v must be on one GPU"),
        (
            q.dtype in (torch.float16, torch.bfloat16) and k.dtype == v.dtype == q.dtype,
            f"q, k and v must all be fp16 or all bf16, got {q.dtype}, {k.dtype} and {v.dtype}",
        ),
        (all(x.stride(-1) == 1 for x in filled), "the last dimension of q, k and v must be contiguous"),
        (all(n < 1 << 31 for x in filled for n in x.stride()), "strides must be below 2^31 elements"),
        (is_aligned, "addresses must be multiples of 16 bytes and outer strides of 16 elements"),
        (
            all((x is not None) == is_packed for x in (*cu_seqlens, *max_seqlens)),
            "cu_seqlens and max_seqlen of q and k must be given for packed tensors and only for them",
        ),
    )
    for ok, rule in rules:
        require(ok, rule)
    for x in cu_seqlens if is_packed else ():
        if x.dtype != torch.int32 or x.device != q.device or x.dim() != 1 or x.numel() != cu_seqlens[0].numel():
            raise ValueError(f"cu_seqlens must be int32 (batch + 1,) beside q, got {x.dtype} {tuple(x.shape)}")


def _sign_masks(head_dim: int, seed: int) -> np.ndarray:
    """Return a mask for each channel, int16 (head_dim,): bit 15 where the rotation changes the sign, else 0."""
    signs = QuantizeOptions(rotate=True, seed=seed).signs(head_dim)
    return np.where(signs < 0, -(1 << 15), 0).astype(np.int16)


@lru_cache(maxsize=64)
def _on_device(table: bytes, device: torch.device) -> torch.Tensor:
    """Copy an int16 table to a device; kept for later calls."""
    return torch.from_numpy(np.frombuffer(table, np.int16).copy()).to(device)


def _operand(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int, descale_rows: int, group: int
) -> QuantizedOperand:
    """Make the buffers of one operand and collect its sizes.

    ``descale_rows`` are the rows that share a descale, 0 for a whole sequence; ``group`` heads share one too. The
    maxima have a buffer of their own only where more than one tile shares a descale.
    """
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    heads = x.shape[-2]
    rows = tile_rows(descale_rows, x.shape[-1])
    tiles = -(-max_seqlen // rows)
    per_block = descale_rows // rows if descale_rows else max(1, tiles)
    blocks = max(1, -(-tiles // per_block))
    make_descale = torch.empty if max_seqlen else torch.ones
    descale = make_descale((batch, heads, blocks), dtype=torch.float32, device=x.device)
    unused = descale.view(torch.int32)  # a tensor of the right type, for arguments that the kernel does not read
    amax = unused
    if per_block > 1 or group > 1:
        amax = torch.zeros((batch, heads // group, blocks), dtype=torch.int32, device=x.device)
    return QuantizedOperand(
        x.view(torch.int16),
        torch.empty(x.shape, dtype=torch.uint8, device=x.device),
        descale,
        amax,
        unused if cu_seqlens is None else cu_seqlens,
        x.stride(0) if cu_seqlens is None else 0,
        x.stride(-3),
        x.stride(-2),
        heads,
        max_seqlen,
        tiles,
        blocks,
        per_block,
        group,
    )


def _correction(
    q: torch.Tensor, k: QuantizedOperand, is_packed: bool, signs: np.ndarray | None, softmax_scale: float
) -> tuple[Correction, list[Call]]:
    """Make the buffers of the K mean and of the LSE correction, and the two calls that compute the mean."""
    head_dim = q.shape[-1]
    device = q.device
    batch = k.descale.shape[0]
    channels = padded_head_dim(head_dim)
    chunks = max(1, -(-k.seqlen // MEAN_CHUNK_ROWS))
    partial = torch.empty((batch, k.heads, chunks, channels), dtype=torch.float32, device=device)
    mean = torch.empty((batch, k.heads, channels), dtype=torch.float32, device=device)
    options = {"num_warps": MEAN_WARPS, "enable_fp_fusion": False}
    sums = (
        k,
        partial,
        chunks,
        head_dim,
        MEAN_CHUNK_ROWS,
        MEAN_TREE_ROWS,
        channels,
        q.dtype == torch.bfloat16,
        is_packed,
    )
    means = (
        partial,
        mean,
        signs,
        k.cu_seqlens,
        k.seqlen,
        k.heads,
        chunks,
        MEAN_CHUNK_ROWS,
        MEAN_FINAL_ROWS,
        channels,
        is_packed,
    )
    calls = [
        Call("k_mean_chunks", sums, (batch * k.heads * chunks,), options),
        Call("k_mean", means, (batch * k.heads,), options),
    ]
    nheads = q.shape[-2]
    rows = q.shape[0] if is_packed else q.shape[1]
    shape = (nheads, rows) if is_packed else (q.shape[0], nheads, rows)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    return Correction(mean, lse, rows, softmax_scale, nheads // k.heads), calls


def _casts(
    operands: list[QuantizedOperand],
    options: QuantizeOptions,
    signs: np.ndarray | None,
    correction: Correction | None,
    *,
    is_bf16: bool,
    is_packed: bool,
    num_sms: int,
) -> Iterator[Call]:
    """Yield the calls of the quantiser: one for all operands that share tile, head_dim and phase.

    An operand whose descales each belong to one tile is done in one pass; of others the maxima come before the casts.
    """
    shapes = [(tile_rows(n, x.x.shape[-1]), x.x.shape[-1]) for n, x in zip(options.descale_rows, operands)]
    fit = [x.tiles_per_block == 1 and x.group == 1 for x in operands]  # one tile is all that shares a descale
    for phase, (rows, head_dim) in product(("one_pass", "amax", "cast"), dict.fromkeys(shapes)):
        counts = [
            x.descale.shape[0] * x.heads * x.tiles if shape == (rows, head_dim) and fits == (phase == "one_pass") else 0
            for shape, fits, x in zip(shapes, fit, operands)
        ]
        if not sum(counts):
            continue
        channels = padded_head_dim(head_dim)
        has_qk = counts[0] + counts[1] > 0
        is_turned = options.rotate and has_qk
        form = tile_form(rows, channels, is_turned)
        programs = num_sms * max(1, REGISTERS_PER_SM // (form.registers * form.threads))
        arguments = (
            *operands,
            *counts,
            signs if is_turned else None,
            correction if has_qk else None,
            form.rows,
            form.parts,
            channels,
            head_dim,
            is_turned,
            options.norm(head_dim) if is_turned else 1.0,
            phase,
            SCALES[options.scale],
            is_bf16,
            is_packed,
            form.lanes,
        )
        launch = {"num_warps": form.threads // 32, "maxnreg": form.registers, "enable_fp_fusion": False}
        yield Call("quantize", arguments, (min(sum(counts), programs),), launch)


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_rows: int | tuple[int, int, int] = 128,
    scope: Scope = "block",
    scale: Scale = "amax",
    rotate: bool = False,
    subtract_k_mean: bool = False,
    seed: int = 0,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> QuantizedTensors:
    """Quantise q, k and v to e4m3.

    Parameters
    ----------
    q : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim) or packed (total_q, nheads, head_dim), on a Hopper GPU
        head_dim a multiple of 16, at most 256; 32, 64, 128 or 256 for a rotation. Last dimension contiguous, other
        strides multiples of 16 elements.
    k, v : same dtype (batch, seqlen_k, nheads_kv, head_dim or head_dim_v) or packed
    block_rows, scope, scale, rotate, subtract_k_mean, seed
        See :class:`fa3_kernels.plan.quantizer.QuantizeOptions`. Scope "block" with 32, 64 or 128 rows reads the data
        once; other scopes twice; a K mean reads k once more.
    softmax_scale : float, optional
        Factor of the LSE correction, rounded to binary32; 1 / sqrt(head_dim) by default.
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,), optional
        First row of each packed sequence, and the end.
    max_seqlen_q, max_seqlen_k : int, optional
        The longest packed sequences; they size the descales, and rows beyond them are not quantised.

    Returns
    -------
    QuantizedTensors
        Contiguous; bits of :func:`fa3_kernels.twin.quantize.quantize_qkv`, which states the error and what NaN and Inf
        become.

    Raises
    ------
    ValueError
        For options, shapes, dtypes or strides the quantiser does not take.
    """
    options = QuantizeOptions(block_rows, scope, scale, rotate, subtract_k_mean, seed)
    check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape), options)
    starts = (cu_seqlens_q, cu_seqlens_k)
    longest = (max_seqlen_q, max_seqlen_k)
    _check(q, k, v, starts, longest)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    with torch.cuda.device(q.device):
        quantized, calls = plan_quantize(q, k, v, options, softmax_scale, starts, longest, num_sms=num_sms)
        for call in calls:
            arguments = (_on_device(x.tobytes(), q.device) if isinstance(x, np.ndarray) else x for x in call.arguments)
            KERNELS[call.kernel][call.grid](*arguments, **call.options)
        return quantized()


def plan_quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: QuantizeOptions,
    softmax_scale: float | None = None,
    starts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    longest: tuple[int | None, int | None] = (None, None),
    *,
    num_sms: int,
) -> tuple[Callable[[], QuantizedTensors], list[Call]]:
    """Make the buffers and the calls of :func:`quantize_qkv`; the tensors may be ones without storage.

    Returns
    -------
    quantized : callable
        Gives the result once the calls have been started.
    calls : list of Call
        To be started in this order.
    """
    factor = lse_factor(softmax_scale, q.shape[-1])
    is_packed = q.dim() == 3
    seqlen_q, seqlen_k = (longest[0] or 0, longest[1] or 0) if is_packed else (q.shape[1], k.shape[1])
    descale_rows = options.descale_rows
    given = (("q", q, starts[0], seqlen_q), ("k", k, starts[1], seqlen_k), ("v", v, starts[1], seqlen_k))
    sharing = SHARING[options.scope]
    operands = [
        _operand(x, of, longest_seqlen, rows, sharing.heads_per_descale(name, q.shape[-2], k.shape[-2]))
        for (name, x, of, longest_seqlen), rows in zip(given, descale_rows, strict=True)
    ]
    signs = _sign_masks(q.shape[-1], options.seed) if options.rotate else None
    correction = None
    calls = []
    if options.subtract_k_mean:
        correction, calls = _correction(q, operands[1], is_packed, signs, float(factor))
    kind = {"is_bf16": q.dtype == torch.bfloat16, "is_packed": is_packed, "num_sms": num_sms}
    calls += _casts(operands, options, signs, correction, **kind)

    def quantized() -> QuantizedTensors:
        """Return the result; its tensors are filled once the calls have run."""
        q8, k8, v8 = (x.out.view(torch.float8_e4m3fn) for x in operands)
        mean = None
        if correction is not None:
            mean = correction.mean[..., : q.shape[-1]]
            if signs is not None:
                # a mask of -2^15 or 0 becomes a factor of -1 or 1, which takes the rotation's signs off again
                mean = mean * (1.0 + _on_device(signs.tobytes(), q.device).float() / (1 << 14))
        q_descale, k_descale, v_descale = (x.descale for x in operands)
        return QuantizedTensors(
            q8, k8, v8, q_descale, k_descale, v_descale, descale_rows, correction.lse if correction else None, mean
        )

    return quantized, calls
