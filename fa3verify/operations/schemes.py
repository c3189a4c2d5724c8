"""Small quantisation schemes that fit a kernel, drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from fa3_reference.problem import AttentionProblem
from fa3_reference.scales import SHARING, Granularity, QuantScheme, can_rotate
from fa3verify.operations.operation import Configure, Descales, Names


@st.composite
def small_schemes(
    draw: st.DrawFn, problem: AttentionProblem, features: Names, configure: Configure, descales: Descales
) -> QuantScheme:
    """Draw a scheme whose K and V blocks are whole key tiles of the kernel's configuration."""
    tile_n = configure(problem).tile_n
    options: list[Granularity] = [name for name, sharing in SHARING.items() if not sharing.claim(2)]  # "head" first
    if "block_descale" in features and descales != "uniform":
        options = ["block"] if descales == "blocks" else [options[0], "block", *options[1:]]
    granularity = draw(st.sampled_from(options))
    each = frozenset({"query_head_descale"})
    if granularity == "head" and problem.group > 1 and each <= features:
        finer = [name for name, sharing in SHARING.items() if sharing.claim(problem.group) == each]
        granularity = draw(st.sampled_from([granularity, *finer]))  # blocks, which find more, stay as frequent
    hadamard_seed = draw(st.one_of(st.none(), st.integers(0, 2**16)))
    return QuantScheme(
        granularity=granularity,  # type: ignore[arg-type]
        block_rows_q=draw(st.sampled_from((4, 16) if descales == "blocks" else (128, 64, 32))),
        block_rows_k=tile_n if descales == "blocks" else tile_n * draw(st.sampled_from((1, 2))),
        block_rows_v=tile_n,
        power_of_two=draw(st.booleans()),
        hadamard_seed=hadamard_seed if can_rotate(problem.head_dim) else None,
        k_mean=problem.softcap == 0 and draw(st.booleans()),
    )
