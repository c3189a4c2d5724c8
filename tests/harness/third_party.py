"""Kernels of other people, as a user would write them: sound ones, narrow ones, one that evades, a broken one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS, encode
from fa3verify.kernels.record import Functions, Kernel
from fa3verify.kernels.sizes import Sizes
from fa3verify.kernels.twins import twin
from fa3verify.operations import FEATURES
from fa3verify.operations.forward import Result


def run(problem, operands, config):
    exact = attention(problem, *operands.dequantized(problem))
    return Result(encode(exact.out, FORMATS[config.out_dtype], "ieee"), exact.lse.astype(np.float32))


def sound() -> Kernel:
    return Kernel(
        "anything", "bf16", Functions(run, default_config), frozenset({"causal", "gqa"}), "float64, rounded once"
    )


def sound_fp8() -> Kernel:
    """Return a kernel that takes any descales, one per row included."""
    return Kernel("anything", "e4m3", Functions(run, default_config), FEATURES, "float64, rounded once")


def picky() -> Kernel:
    def refuse(problem):
        raise ValueError("nothing is supported")

    return Kernel("anything", "fp16", Functions(run, refuse), frozenset())


def only_64() -> Kernel:
    """Return a sound kernel that takes one head_dim and no mask, and does not even declare it."""

    def configure(problem):
        if problem.head_dim != 64:
            raise ValueError(f"head_dim must be 64, got {problem.head_dim}")
        return default_config(problem)

    return Kernel("anything", "fp16", Functions(run, configure), frozenset())


def _without_the_last_key(problem, operands, config):
    if problem.seqlen_k < 2:
        return run(problem, operands, config)
    shorter = replace(problem, seqlen_k=problem.seqlen_k - 1)
    return run(shorter, replace(operands, k=operands.k[:, :-1], v=operands.v[:, :-1]), config)


def only_64_broken() -> Kernel:
    return only_64().altered(run=_without_the_last_key)


def _whole_tiles_alone(problem, operands, config):
    """Fail on what is not declared, as a kernel without masks for its last tile would."""
    lengths = [n for seq in problem.sequences() for n in (seq.seqlen_q, seq.seqlen_k)]
    if any(n % 64 or n < 128 for n in lengths) or problem.head_dim != 64:
        raise RuntimeError("misaligned address")
    return run(problem, operands, config)


def in_whole_tiles() -> Kernel:
    """Return a sound kernel that takes only whole tiles of 64, at least two, and head_dim 64."""
    sizes = {"head_dims": (64,), "sizes": Sizes(seqlen_multiple=64, min_seqlen=128)}
    return Kernel(
        "anything", "bf16", Functions(_whole_tiles_alone, default_config), frozenset({"causal", "varlen"}), **sizes
    )


def evasive() -> Kernel:
    """Return a kernel that refuses whatever may be hard, which is no way to pass."""

    def configure(problem):
        if problem.seqlen_k > 64:
            raise ValueError(f"at most 64 keys, got {problem.seqlen_k}")
        return default_config(problem)

    return Kernel("anything", "fp16", Functions(run, configure), frozenset({"causal", "window"}))


def _in_three_splits(problem, operands, config):
    return twin("fp16").code.run(problem, operands, replace(config, num_splits=3))


def other_bits() -> Kernel:
    """Return a kernel that promises the twin's bits and stays within its bound, but merges three splits."""
    return Kernel(
        "anything", "fp16", Functions(_in_three_splits, default_config), frozenset({"causal", "gqa"}), twin=twin("fp16")
    )
