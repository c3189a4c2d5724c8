"""The gradient of attention's output under a real loss: the cross entropy of a linear readout of that output.

    logits = concat_heads(O) W,   loss = sum over tokens of -log softmax(logits)[target],   dO = (softmax - onehot) W^T

W is normal with variance 1 / width, targets are uniform; both follow from the seed. All rows of dO are combinations of
the same directions of W, mainly of that of the row's target, unlike rows that are drawn independently.
"""

from __future__ import annotations

import numpy as np

from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem

CLASSES = 64  # of the readout


def readout_dout(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, seed: int) -> np.ndarray:
    """Return dO of the loss summed over tokens, float64 of the problem's out_shape.

    Rows without a key have an output of 0, and so a gradient that is not 0. NaN and Inf spread to their token's row.
    """
    rng = np.random.default_rng(seed)
    out = attention(problem, q, k, v).out
    rows = out.reshape(-1, problem.nheads * problem.head_dim_v)
    readout = rng.standard_normal((rows.shape[1], CLASSES)) / np.sqrt(rows.shape[1])
    logits = rows @ readout
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    share[np.arange(len(rows)), rng.integers(CLASSES, size=len(rows))] -= 1
    return (share @ readout.T).reshape(out.shape)
