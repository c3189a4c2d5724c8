"""Attention over all keys from attention over parts of them, as where they lie on several GPUs."""

from __future__ import annotations

import torch

from fa3_kernels.operators import returned


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them, in fp32; differentiable.

    Parameters
    ----------
    out_partial : float32 (parts, ..., nheads, head_dim)
        Outputs over each part, such as (parts, batch, seqlen, nheads, head_dim).
    lse_partial : float32 (parts, ..., nheads)
        Their natural lse; -inf where a row sees no key of a part, whose output then counts for nothing.
    out : (..., nheads, head_dim), optional
        Memory for the output.
    out_dtype : torch.dtype, optional
        That of ``out``, or float32, by default.

    Returns
    -------
    out : (..., nheads, head_dim)
        Rows without a key in any part are 0.
    lse : float32 (..., nheads)
        -inf for rows without a key.

    Raises
    ------
    ValueError
        For other dtypes, and for shapes that do not fit each other.

    Examples
    --------
    >>> out, lse = flash_attn_combine(torch.tensor([[[1.0]], [[4.0]]]), torch.tensor([[0.0], [0.0]]))
    >>> out.item(), round(lse.item(), 4)
    (2.5, 0.6931)
    """
    if out_partial.shape[:-1] != lse_partial.shape or {out_partial.dtype, lse_partial.dtype} != {torch.float32}:
        given = f"{out_partial.dtype} {tuple(out_partial.shape)} and {lse_partial.dtype} {tuple(lse_partial.shape)}"
        raise ValueError(f"out_partial and lse_partial must be float32 of one shape but for head_dim, got {given}")
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse.where(lse.isfinite(), 0.0)).exp()[..., None]
    merged = (weights * out_partial.where(weights != 0, 0.0)).sum(0)
    dtype = out_dtype or (torch.float32 if out is None else out.dtype)
    return returned(merged.to(dtype), out), lse
