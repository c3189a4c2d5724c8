"""The torch operators ``fa3verify::forward`` and ``fa3verify::forward_varlen``, and the rules their operands must keep.

The rules are checked by the shapes, dtypes and strides alone, so they hold for fake tensors (torch.compile) as well.
"""

from __future__ import annotations

from typing import Any

import torch

from fa3_reference.problem import AttentionProblem, Dtype

OUT_DTYPES = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float8_e4m3fn: torch.bfloat16,
}
_NAMES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}


def require(ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(rule)


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Raise ValueError unless a GPU is Hopper: the instructions of these kernels exist on compute capability 9.0 alone."""
    major, minor = capability
    require(major == 9, f"a Hopper GPU (compute capability 9.0) is needed, got {name} with {major}.{minor}")


def check_unsupported(
    qv: object, attention_chunk: int, sm_margin: int, tensors: tuple[torch.Tensor, ...], **others: object
) -> None:
    """Refuse what upstream has and these kernels have not."""
    require(qv is None, "qv (a second query tensor multiplied with V) is not supported, pass None")
    require(attention_chunk == 0, f"attention_chunk is not supported and must be 0, got {attention_chunk}")
    require(sm_margin == 0, f"sm_margin is not supported and must be 0, got {sm_margin}")
    for name, value in others.items():
        require(value is None, f"{name} is not supported, pass None")
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    require(not wants_gradient, "these kernels are forward only: call them under torch.no_grad() or detach q, k and v")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int) -> None:
    """Refuse tensors the kernels cannot read; holds for fake tensors too."""
    tensors = (q, k, v)
    devices = {x.device for x in tensors}
    on_gpu = len(devices) == 1 and q.is_cuda
    require(on_gpu, f"q, k and v must be on one Hopper GPU, got {', '.join(sorted(map(str, devices)))}")
    axes = "(batch, seqlen, nheads, head_dim)" if rank == 4 else "(total, nheads, head_dim)"
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
    require(all(x.ndim == rank for x in tensors), f"q, k and v must be {axes}, got {shapes}")
    dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
    is_one_dtype = q.dtype in OUT_DTYPES and k.dtype == v.dtype == q.dtype
    require(is_one_dtype, f"q, k and v must share float16, bfloat16 or float8_e4m3fn, got {dtypes}")
    require(k.shape[:-1] == v.shape[:-1], f"k and v must have one shape but for head_dim, got {shapes}")
    require(q.shape[-1] == k.shape[-1] and (rank == 3 or q.shape[0] == k.shape[0]), f"k and v must fit q, got {shapes}")
    multiple = 16 // q.dtype.itemsize
    for name, x in zip("qkv", tensors):
        head_dim = x.shape[-1]
        require(
            0 < head_dim <= 256 and head_dim % multiple == 0,
            f"head_dim must be a multiple of {multiple}, at most 256, got {name} {tuple(x.shape)}",
        )
        if x.numel():  # the strides of an empty tensor mean nothing
            require(x.stride(-1) == 1, f"the last dimension of {name} must be contiguous, got strides {x.stride()}")
            is_aligned = not any(n % multiple for n in x.stride()[:-1])
            require(is_aligned, f"strides of {name} must be multiples of 16 bytes (TMA), got {x.stride()} elements")
    nheads, nheads_kv = q.shape[-2], k.shape[-2]
    require(
        nheads_kv > 0 and nheads % nheads_kv == 0,
        f"nheads must be a multiple of nheads_kv, got {nheads} and {nheads_kv}",
    )


def check_descales(
    q: torch.Tensor, k: torch.Tensor, batch: int, descales: dict[str, torch.Tensor | None], block_rows: tuple[int, ...]
) -> None:
    """Refuse descales of the wrong kind: per (batch, kv head) as upstream, or with a third axis of row blocks."""
    require(len(block_rows) == 3, f"descale_blocks must hold three numbers, for q, k and v, got {block_rows}")
    nheads, nheads_kv = q.shape[-2], k.shape[-2]
    for (name, x), rows in zip(descales.items(), block_rows):
        if x is None:
            require(rows == 0, f"descale_blocks names blocks of {rows} rows for {name}, which is None")
            continue
        require(q.dtype == torch.float8_e4m3fn, f"{name} is for float8_e4m3fn operands, got {q.dtype}")
        require(x.dtype == torch.float32, f"{name} must be float32, got {x.dtype}")
        heads = (nheads, nheads_kv) if name == "q_descale" and x.ndim == 3 else (nheads_kv,)
        rank = 3 if rows else 2
        fits = x.ndim == rank and x.shape[0] == batch and x.shape[1] in heads
        shape = f"({batch}, {nheads_kv}{', blocks' if rows else ''})"
        require(fits, f"{name} must be {shape} (batch, nheads_kv), got {tuple(x.shape)}")


def choices(
    softmax_scale: float | None, causal: bool, window: tuple[int, int], softcap: float, num_splits: int
) -> dict[str, Any]:
    left, right = (int(w) for w in window)
    require(num_splits >= 0, f"num_splits must be 0 (chosen from the shape) or positive, got {num_splits}")
    scale = None if softmax_scale is None else float(softmax_scale)
    require(scale is None or scale > 0, f"softmax_scale must be > 0, got {softmax_scale}")
    return {
        "softmax_scale": scale,
        "causal": bool(causal),
        "window_left": left,
        "window_right": right,
        "softcap": float(softcap),
        "num_splits": int(num_splits),
    }


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: dict[str, torch.Tensor | None],
    block_rows: list[int],
    promotion_interval: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Start the kernels; the FP8 options exist for FP8 operands only."""
    from fa3_kernels.gluon.launch import forward

    check_capability(torch.cuda.get_device_capability(q.device), torch.cuda.get_device_name(q.device))
    options["window"] = (options.pop("window_left"), options.pop("window_right"))
    if q.dtype == torch.float8_e4m3fn:
        options |= {name: x for name, x in descales.items() if x is not None}
        options["descale_blocks"] = tuple(block_rows)
        options["promotion_interval"] = promotion_interval
    return forward(q, k, v, **options)


def check_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: dict[str, Any]) -> None:
    """The rules of the problem itself: sizes, window, softcap."""
    AttentionProblem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3], _NAMES[q.dtype],
        chosen["causal"], (chosen["window_left"], chosen["window_right"]), chosen["softcap"],
        chosen["softmax_scale"] or 0.0,
    )  # fmt: skip


@torch.library.custom_op("fa3verify::forward", mutates_args=(), device_types="cuda")
def forward_op(  # noqa: PLR0913 (an operator's schema)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    num_splits: int,
    pack_gqa: bool | None,
    descale_blocks: list[int],
    promotion_interval: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of batched sequences; arguments as :func:`flash_attn_func`. Returns out and lse."""
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return _launch(
        q, k, v, descales, descale_blocks, promotion_interval, softmax_scale=softmax_scale, causal=causal,
        window_left=window_left, window_right=window_right, softcap=softcap, num_splits=num_splits, pack_gqa=pack_gqa,
    )  # fmt: skip


@forward_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v, 4)
    batch, seqlen_q, nheads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, nheads, v.shape[-1]), dtype=OUT_DTYPES[q.dtype])
    return out, q.new_empty((batch, nheads, seqlen_q), dtype=torch.float32)


@torch.library.custom_op("fa3verify::forward_varlen", mutates_args=(), device_types="cuda")
def forward_varlen_op(  # noqa: PLR0913 (an operator's schema)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    num_splits: int,
    pack_gqa: bool | None,
    descale_blocks: list[int],
    promotion_interval: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences; arguments as :func:`flash_attn_varlen_func`. Returns out and lse."""
    starts = [x.cpu() for x in (cu_seqlens_q, cu_seqlens_k)]
    for name, x, limit in zip(("max_seqlen_q", "max_seqlen_k"), starts, (max_seqlen_q, max_seqlen_k)):
        longest = int(x.diff().max()) if x.numel() > 1 else 0
        require(longest <= limit, f"{name} must be at least the longest sequence, {longest}, got {limit}")
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return _launch(
        q, k, v, descales, descale_blocks, promotion_interval, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        softmax_scale=softmax_scale, causal=causal, window_left=window_left, window_right=window_right,
        softcap=softcap, num_splits=num_splits, pack_gqa=pack_gqa,
    )  # fmt: skip


@forward_varlen_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v, 3)
    total_q, nheads, _ = q.shape
    out = q.new_empty((total_q, nheads, v.shape[-1]), dtype=OUT_DTYPES[q.dtype])
    return out, q.new_empty((nheads, total_q), dtype=torch.float32)
