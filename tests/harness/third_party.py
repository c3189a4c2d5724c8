"""Kernels of other people, as a user would write them: sound ones, one that returns a wrong shape, one that fails."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS, encode
from fa3verify.candidates import FEATURES, Candidate, Result, twin


def run(problem, operands, config):
    exact = attention(problem, *operands.dequantized(problem))
    return Result(encode(exact.out, FORMATS[config.out_dtype], "ieee"), exact.lse.astype(np.float32))


def sound() -> Candidate:
    return Candidate("anything", "bf16", run, default_config, frozenset({"causal", "gqa"}), "float64, rounded once")


def sound_fp8() -> Candidate:
    """Return a kernel that takes any descales, one per row included."""
    return Candidate("anything", "e4m3", run, default_config, FEATURES, "float64, rounded once")


def _short(problem, operands, config):
    out, lse = run(problem, operands, config)
    return Result(out[..., :-1], lse)


def wrong_shape() -> Candidate:
    return Candidate("anything", "fp16", _short, default_config, frozenset({"causal", "gqa"}))


def _die(problem, operands, config):
    os._exit(9)


def crashing() -> Candidate:
    return Candidate("anything", "fp16", _die, default_config, frozenset({"causal"}))


def picky() -> Candidate:
    def refuse(problem):
        raise ValueError("nothing is supported")

    return Candidate("anything", "fp16", run, refuse, frozenset())


def _only_128(problem):
    if problem.head_dim != 128:
        raise ValueError(f"head_dim must be 128, got {problem.head_dim}")
    return default_config(problem)


def narrow() -> Candidate:
    return Candidate("anything", "fp16", run, _only_128, frozenset())


def _in_three_splits(problem, operands, config):
    return twin("fp16").run(problem, operands, replace(config, num_splits=3))


def other_bits() -> Candidate:
    """Return a kernel that promises the twin's bits and stays within its bound, but merges three splits."""
    return Candidate(
        "anything", "fp16", _in_three_splits, default_config, frozenset({"causal", "gqa"}), twin="twin.fp16"
    )
