"""What builds that serve returned on a GPU lies within the error bound of the truth of their calls.

``serving_h200.npz`` holds the first four heads of nine bf16 calls of vllm 0.33.0 and sglang-kernel 0.4.5, recorded on
an H200 with torch 2.11 on 2026-11-23; keys are LIBRARY/CALL. Inputs are numpy's default_rng(seed), rounded to bf16. The
recorder shares no code with this project.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds.calls import call_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.cache import Cache, gathered
from fa3_reference.problem import AttentionProblem, Operands

BF16 = ml_dtypes.bfloat16
FILE = Path(__file__).with_name("serving_h200.npz")
GROUP = 4
DECODED = (1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 161, 176, 177, 192, 193)
DECODED += (224, 225, 256, 257, 511, 1000, 2047)


def _normal(seed: int, shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(std)
    return x.astype(BF16)


def _packed(x: np.ndarray, lengths: tuple[int, ...], starts: tuple[int, ...] = ()) -> np.ndarray:
    """Keys of every sequence, of the first kv head."""
    starts = starts or (0,) * len(lengths)
    return np.concatenate([x[b, s : s + n, :1] for b, (s, n) in enumerate(zip(starts, lengths, strict=True))])


def _problem(queries: int, lengths: tuple[int, ...], cache: Cache, **other) -> AttentionProblem:
    fields = {"nheads": GROUP, "nheads_kv": 1, "head_dim": 128, "dtype": "bf16", "causal": True} | other
    return AttentionProblem.varlen((queries,) * len(lengths), lengths, cache=cache, **fields)


def _operands(q: np.ndarray, k: np.ndarray, v: np.ndarray, **other) -> Operands:
    return Operands(q[:, :, :GROUP].reshape(-1, GROUP, q.shape[-1]), k, v, **other)


def _sinks(window: int):
    lengths = (1, 5, 64, 300, 700)
    k, v = (_packed(_normal(seed, (5, 704, 8, 128)), lengths) for seed in (41, 42))
    mask = {"causal": window < 0, "window": (window, -1 if window < 0 else 0)}
    sinks = _normal(40, (32,), 2.0)[:GROUP].astype(np.float32)
    problem = _problem(4, lengths, Cache(16), sinks=True, **mask)
    return problem, _operands(_normal(48, (5, 4, 32, 128)), k, v, sinks=sinks)


def _decode():
    k, v = (_packed(_normal(seed, (30, 2048, 8, 128)), DECODED) for seed in (21, 22))
    return _problem(1, DECODED, Cache(16)), _operands(_normal(120, (30, 1, 32, 128)), k, v)


def _appended(**rotary):
    before = (0, 1, 100, 500)
    lengths = tuple(n + 3 for n in before)
    k, v, new_k, new_v = (_normal(61 + i, (4, n, 8, 128)) for i, n in enumerate((576, 576, 3, 3)))
    for b, n in enumerate(before):
        k[b, n : n + 3], v[b, n : n + 3] = new_k[b], new_v[b]
    operands = _operands(_normal(65, (4, 3, 32, 128)), _packed(k, lengths), _packed(v, lengths))
    return _problem(3, lengths, Cache(new=(3,) * 4, **rotary)), operands


def _leftpad():
    pads, ends = (0, 7, 100), (512, 300, 130)
    lengths = tuple(end - pad for pad, end in zip(pads, ends, strict=True))
    k, v = (_packed(_normal(seed, (3, 512, 8, 128)), lengths, pads) for seed in (71, 72))
    return _problem(4, lengths, Cache(leftpad=pads)), _operands(_normal(77, (3, 4, 32, 128)), k, v)


def _batch_idx():
    problem = _problem(4, (500, 100, 17), Cache(indexed=True))
    stored = {name: _normal(seed, (6, 512, 8, 128))[:, :, :1] for name, seed in (("k_cache", 81), ("v_cache", 82))}
    k, v = gathered(problem, stored | {"cache_batch_idx": np.array([4, 0, 2], np.int32)})
    return problem, _operands(_normal(87, (3, 4, 32, 128)), k, v)


def _qv():
    lengths = (700, 129, 5)
    k, v = _packed(_normal(91, (3, 704, 1, 64)), lengths), _packed(_normal(92, (3, 704, 1, 512), 0.5), lengths)
    q = np.concatenate([_normal(97, (3, 4, 16, 64)), _normal(197, (3, 4, 16, 512), 0.5)], axis=-1)
    problem = _problem(4, lengths, Cache(64), head_dim=576, head_dim_v=512, qv=True)
    return problem, _operands(q, np.concatenate([k, v], axis=-1), v)


CALLS = {
    "vllm/sinks/window-1": lambda: _sinks(-1),
    "vllm/sinks/window127": lambda: _sinks(127),
    "vllm/decode.bf16/bf16.paged16.q=1.causal=1": _decode,
    "sgl/append/plain.1": _appended,
    "sgl/rotary/rotary.0": lambda: _appended(rotary_dim=64),
    "sgl/rotary/rotary.1": lambda: _appended(rotary_dim=64, interleaved=True),
    "sgl/leftpad/q4.s4": _leftpad,
    "sgl/batchidx/q4.s1": _batch_idx,
    "vllm/qv/only0.page64": _qv,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_lies_within_its_bound(name):
    problem, operands = CALLS[name]()
    with np.load(FILE) as recorded:
        got = recorded[name].view(BF16).astype(float).reshape(problem.out_shape)
    error = np.abs(got - attention(problem, *operands.dequantized(problem)).out)
    bound = call_bound(problem, operands, KernelModel.any_order("bf16", "bf16", "either", weights="running")).out
    assert np.all(error <= bound), f"{np.max(error / bound):.3g} times the bound"
    assert np.mean(error / np.maximum(bound, 1e-30)) > 0.02, "a bound so wide says nothing"


def test_recorded_calls_leave_the_bound_of_others():
    # the sink, the other order of rotated channels and one key less are each far beyond it
    for name, other in (
        ("vllm/sinks/window-1", lambda: _sinks(-1)),
        ("sgl/rotary/rotary.0", CALLS["sgl/rotary/rotary.1"]),
        ("sgl/append/plain.1", CALLS["sgl/rotary/rotary.1"]),
    ):
        problem, operands = other()
        if problem.sinks:
            operands = _without_sinks(operands)
        with np.load(FILE) as recorded:
            got = recorded[name].view(BF16).astype(float).reshape(problem.out_shape)
        error = np.abs(got - attention(problem, *operands.dequantized(problem)).out)
        bound = call_bound(problem, operands, KernelModel.any_order("bf16", "bf16", "either", weights="running")).out
        assert np.max(error / np.maximum(bound, 1e-30)) > 10


def _without_sinks(operands: Operands) -> Operands:
    none = np.full(GROUP, -np.inf, np.float32)
    return Operands(operands.q, operands.k, operands.v, sinks=none)
