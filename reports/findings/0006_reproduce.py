"""NaN in gradients of cuDNN of low scores: ``python reports/findings/0006_reproduce.py``, on Hopper."""

from __future__ import annotations

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import GivenBackward, loaded

HEAD_DIM = 64


def not_finite(name: str, queries: int, keys: int, shift: float) -> list[int]:
    """Elements of dQ, dK and dV that are NaN or infinite; scores are about ``-shift``."""
    torch.manual_seed(0)
    by = (shift / HEAD_DIM**0.5) ** 0.5

    def drawn(seqlen: int, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn((1, seqlen, 2, HEAD_DIM), device="cuda") + mean).to(torch.bfloat16)

    q, k, v, dout = drawn(queries, by), drawn(keys, -by), drawn(keys), drawn(queries)
    exact = [x.double().transpose(1, 2) for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) * HEAD_DIM**-0.5
    out = (scores.softmax(-1) @ exact[2]).transpose(1, 2).contiguous().to(torch.bfloat16)
    given = GivenBackward(q, k, v, dout, out, scores.logsumexp(-1).float().contiguous())
    problem = AttentionProblem(1, 2, 2, queries, keys, HEAD_DIM, dtype="bf16")
    return [int((~torch.isfinite(x)).sum()) for x in loaded(name, "backward")(problem, given, {})()]


if __name__ == "__main__":
    for queries, keys in ((64, 64), (1, 64), (1, 128)):
        for shift in (0.0, 100.0, 1000.0):
            found = {name: not_finite(name, queries, keys, shift) for name in ("cudnn", "flash2")}
            print(f"{queries} x {keys}, scores about {-shift:g}: not finite in dQ, dK, dV {found}")
