"""Cases that decide what broad and corner ones leave open, each for a rule that a twin has by source or not at all.

Calls without a key, which were refused for their strides; FlashAttention-2's blocks that mask nothing, where a row has
only seen scores of -inf, and its cut of the keys under a causal mask; cuDNN's one query over other lengths and heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.bits.corner_cases import no_keys
from fa3_reports.bits.recorded_cases import Draws
from fa3verify.cases.case import Case
from fa3verify.inputs.edits import Edit
from fa3verify.inputs.recipe import Recipe

FIRST_SEED = 9_000_000  # plus a million for every dtype
ONE_QUERY_KEYS = (7, 200, 257, 384, 513, 640, 768, 1000, 1024, 1280, 1536, 2000, 2047, 2048, 3000, 4097, 8192, 20000)


def _unguarded(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """A head whose scores are all -inf or +inf, among so many that a part of the keys has several blocks."""
    alike = Edit("scale_channel", "k", channel=3, value=float("inf"))
    for head_dim, nheads in product((64, 128), (240, 100)):
        recipe = Recipe("ties", {"distinct": 1}, next(draws.seeds), (alike,))
        yield draws.case(library, AttentionProblem(1, nheads, nheads, 64, 1400, head_dim, dtype=dtype), recipe)


def _cut_under_a_mask(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Causal, and so few row tiles that the keys are cut, each part with several blocks."""
    for head_dim, sizes in product((64, 128, 256), ((1, 5, 5, 1000, 1000), (1, 4, 2, 1200, 3000))):
        recipe = Recipe("normal", {}, next(draws.seeds))
        yield draws.case(library, AttentionProblem(*sizes, head_dim, dtype=dtype, causal=True), recipe)


def _one_query(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Lengths on both sides of powers of two, and numbers of heads that fill the GPU."""
    for head_dim, keys in product((64, 128, 256), ONE_QUERY_KEYS):
        recipe = Recipe("normal", {}, next(draws.seeds))
        yield draws.case(library, AttentionProblem(1, 8, 2, 1, keys, head_dim, dtype=dtype), recipe)
    for head_dim, (batch, heads), keys in product((32, 96, 128), ((1, 1), (8, 32), (64, 16)), (100, 400, 1000, 3000)):
        yield draws.case(library, AttentionProblem(batch, heads, heads, 1, keys, head_dim, dtype=dtype))


_KINDS = {
    "flash3": (no_keys,),
    "flash2": (no_keys, _unguarded, _cut_under_a_mask),
    "cudnn": (_one_query,),
}


def gaps(library: str, dtypes: tuple[str, ...]) -> list[Case]:
    """Cases of a library in a fixed order; none where nothing is open."""
    found: list[Case] = []
    for i, dtype in enumerate(("fp16", "bf16", "e4m3")):
        if dtype in dtypes:
            draws = Draws(FIRST_SEED + 1_000_000 * i)
            found += [case for kind in _KINDS.get(library, ()) for case in kind(library, dtype, draws)]
    return found
