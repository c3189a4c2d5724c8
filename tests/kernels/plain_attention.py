"""Attention as plain float32 sums with gradients, and how Transformers' models say that sequences are packed."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="needs torch")


def probabilities(q, k, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """P of (batch, seqlen, nheads, head_dim), bottom-right aligned, and lse; as many heads of k as of q."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row, key = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    distance = key - row[:, None] - (k.shape[1] - q.shape[1])
    left, right = window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    is_alone = hidden.all(-1)  # rows without a key, whose derivative would be NaN
    scores = scores.masked_fill(hidden & ~is_alone[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse[..., None]).masked_fill(is_alone[:, None], 0.0)
    return p, lse.masked_fill(is_alone, -math.inf)


def attention(q, k, v, sinks=None, **options):
    """Output like q, and lse; sinks (nheads,) are one more term of each row's sum."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    p, lse = probabilities(q, k, **options)
    if sinks is not None:
        p = p * (lse - lse.logaddexp(sinks[:, None])).exp()[..., None]
        lse = lse.logaddexp(sinks[:, None])
    return torch.einsum("bhqk,bkhd->bqhd", p, v.float()).to(q.dtype), lse


def packed_attention(q, k, v, starts_q, starts_k, max_q, max_k, **options):
    """The same of packed sequences, one after the other."""
    for starts, rows, longest in ((starts_q, len(q), max_q), (starts_k, len(k), max_k)):
        assert (starts[0], starts[-1]) == (0, rows)
        assert 0 <= starts.diff().min() <= starts.diff().max() <= longest
    parts = [
        attention(q[None, a:b], k[None, c:d], v[None, c:d], **options)
        for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


# position_ids of a batch of one, and where the sequences start; None where there is one
TEXT = [0, 1, 2, 0, 1, 2, 3]  # sequences of three and four tokens
IMAGE = [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]  # a token, four patches, a token
PATCHES = [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]  # an image in front
POSITIONS = {
    "none": (None, None),
    "of one sequence": ([[0, 1, 2, 3]], None),
    "packed": ([TEXT], [0, 3, 7]),
    "without a batch": (TEXT, [0, 3, 7]),
    "from two on, as RoBERTa's": ([[2, 3, 4, 2, 3]], [0, 3, 5]),
    "of a continued chunk": ([[7, 8, 9]], None),
    "packed behind a continued chunk": ([[3, 4, 5, 0, 1]], [0, 3, 5]),
    "of padding on the left": ([[1, 1, 0, 1, 2]], [0, 2, 5]),
    "all zero": ([[0, 0, 0]], [0, 1, 2, 3]),
    "of three axes": ([[[0, 1, 2, 3]]] * 3, None),
    "of three axes, packed": ([[TEXT]] * 3, [0, 3, 7]),
    "of an image": ([[x] for x in IMAGE], None),
    "of images, packed": ([[x + x] for x in IMAGE], [0, 6, 12]),
    "of images in front, packed": ([[x + y] for x, y in zip(PATCHES, IMAGE, strict=True)], [0, 5, 11]),
    "of text in front of the axes": ([[TEXT], [[4, 5, 6, 0, 1, 2, 3]], [[4, 5, 6, 0, 1, 2, 3]], [TEXT]], [0, 3, 7]),
    "of text, one sequence": ([[[0, 1, 2, 3, 4, 5]], *([x] for x in IMAGE)], None),
}
QWEN2_VL = {
    "text_config": {
        **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    },
    "vision_config": {
        **{"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "in_channels": 3},
        **{"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
    **{"image_token_id": 35, "video_token_id": 36, "vision_start_token_id": 33, "vision_end_token_id": 34},
}
