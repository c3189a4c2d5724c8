"""Why two calls give other bits: the differences of their launches, read from configuration, plan and traits.

:mod:`fa3verify.compare.run` asks for the reason when it has found a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3verify.text import plural


def reason(a: Any, b: Any, problems: tuple[AttentionProblem, AttentionProblem]) -> str:
    """Return in words which differences of two launches change bits, or that none is known.

    Configurations that are no :class:`Config` say nothing of a launch, which the answer says.

    >>> problem = AttentionProblem(1, 1, 1, 1, 97, 128, dtype="e4m3")
    >>> reason(Config("e4m3", tile_n=96), Config("e4m3", tile_n=192), (problem, problem))
    'a tile has 96 keys against 192, so 97 keys are 2 tiles against 1'
    """
    if not isinstance(a, Config) or not isinstance(b, Config):
        return "the kernels do not say how they are launched"
    return "; ".join(_differences(a, b, problems)) or "nothing that is known of the two launches differs"


def _differences(a: Config, b: Config, problems: tuple[AttentionProblem, AttentionProblem]) -> Iterator[str]:
    """Yield what two launches have different: order of operations, tiles, parts of the keys, formats."""
    orders = a.traits.order, b.traits.order
    differing = [f.name for f in fields(orders[0]) if getattr(orders[0], f.name) != getattr(orders[1], f.name)]
    if differing:
        yield f"families {a.family} and {b.family} differ in {', '.join(differing)}"
    if a.tile_n != b.tile_n:
        keys = min(problem.seqlen_k for problem in problems)
        counts = [-(-keys // config.tile_n) for config in (a, b)]
        split = f"{keys} keys are {plural(counts[0], 'tile')} against {counts[1]}"
        yield f"a tile has {a.tile_n} keys against {b.tile_n}, so {split}"
    splits = [x.traits.sequence_splits(problem, x)[0] for x, problem in zip((a, b), problems, strict=True)]
    lengths = [(problem.seqlen_q, problem.seqlen_k) for problem in problems]
    if splits[0] != splits[1]:
        yield f"keys are cut into {plural(splits[0], 'part')} against {splits[1]}"
    elif splits[0] != 1 and problems[0].causal and lengths[0] != lengths[1]:
        # The same number of parts of other ranges: a row's tile sees other keys where the lengths differ.
        yield f"either cuts the keys that a row's tile sees into {splits[0]} parts, and the tile is another"
    words = {"promotion_interval": "keys of a promoted sum", "out_dtype": "the output format", "dtype": "the dtype"}
    for name, what in words.items():
        if getattr(a, name) != getattr(b, name):
            yield f"{what} {'is' if 'the' in what else 'are'} {getattr(a, name)} against {getattr(b, name)}"


def splits_of(config: Any, problem: AttentionProblem) -> int | None:
    """Return the splits of the first sequence, which packed ones may share unevenly; None where they are not known.

    >>> from fa3_kernels.plan.config import default_config
    >>> problem = AttentionProblem.varlen((1,) * 9, (4000,) + (3000,) * 8, nheads=32, nheads_kv=32, head_dim=128)
    >>> splits_of(default_config(problem, family="flash3", num_splits=4), problem)
    1
    """
    return config.traits.sequence_splits(problem, config)[0] if isinstance(config, Config) else None
