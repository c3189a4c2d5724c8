"""NaN in dQ of cuDNN where every score is far below zero: ``python reports/findings/0006_reproduce.py``, on Hopper."""

from __future__ import annotations

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.adapters import backward_launches
from fa3verify.adapters.backward_launches import GivenBackward

ROWS, HEAD_DIM = 64, 64


def not_finite(name: str, shift: float) -> int:
    """Elements of dQ that are NaN or infinite; scores are about ``-shift``."""
    torch.manual_seed(0)
    shape, by = (1, ROWS, 2, HEAD_DIM), (shift / HEAD_DIM**0.5) ** 0.5
    q, k = ((torch.randn(shape, device="cuda") + sign * by).to(torch.bfloat16) for sign in (1, -1))
    v, dout = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(2))
    exact = [x.double().transpose(1, 2) for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) * HEAD_DIM**-0.5
    out = (scores.softmax(-1) @ exact[2]).transpose(1, 2).contiguous().to(torch.bfloat16)
    given = GivenBackward(q, k, v, dout, out, scores.logsumexp(-1).float().contiguous())
    problem = AttentionProblem(1, 2, 2, ROWS, ROWS, HEAD_DIM, dtype="bf16")
    dq = backward_launches.loaded(name)(problem, given)().dq
    return int((~torch.isfinite(dq)).sum())


if __name__ == "__main__":
    for shift in (0.0, 100.0, 1000.0):
        print(f"scores about {-shift:g}:", {name: not_finite(name, shift) for name in ("cudnn", "flash2")})
