"""How many instructions of a key block are no arithmetic, as ptxas compiled them: addresses, descriptors of wgmma,
moves, predicates, branches.

For our own kernels they are counted in the accepted code (``fa3_kernels/audit/audit.json``): the instructions of an
unmasked loop, less the arithmetic that the simulator charges by itself (:mod:`fa3_simulator.vector_work`, which reads
the numbers of this module). The rows of a tile do not matter, as a warpgroup has 64 of them. A tile that nobody
compiled is taken to have as many as the most similar tile that was compiled.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from fa3_kernels.audit.evidence import accepted_rows
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS, traits_of

# Per key block and warp: the instructions for the running maximum and the rescaling factor of each lane's two rows.
STATISTICS_ALU = 6
STATISTICS_MUFU = 2
STATISTICS_SHUFFLES = 4
_PLAIN = re.compile(r"(fp16|e4m3)_d(\d+)(?:_v(\d+))?_dense(_chained)?(?:_128_rows)?/forward_fp\d+")
_CLASSES = ("HGMMA", "QGMMA", "MUFU.EX2", "FFMA", "FMUL", "FADD", "BAR")
_Step = tuple[bool, bool, int, int, int]  # is e4m3, sums are promoted, channels of Q and of V, keys of a tile


@cache
def _counted() -> dict[_Step, int]:
    """Return the count of every tile that was compiled; where two have equally many keys, that of the taller one.

    Where maxima are taken by integers, the loop holds code for both ways to take them, with the shuffles of each. The
    other way is not run, except two comparisons that lead there.
    """
    counts: dict[_Step, int] = {}
    for name, figures in accepted_rows().items():
        if kernel := _PLAIN.fullmatch(name):
            dtype, d, v, chained = kernel.groups()
            is_fp8 = dtype == "e4m3"
            promotes = is_fp8 and not chained
            words = figures["loops"][0].split()
            loop = Counter(dict(zip(words[::2], map(int, words[1::2]), strict=True)))
            keys = 2 * (loop["MUFU.EX2"] - STATISTICS_MUFU)
            is_integer = traits_of(OURS).sizes[is_fp8, int(d)].integer_max[promotes][False]
            maxima = keys // 4 + STATISTICS_ALU + loop["FMNMX"] + 2 if is_integer else loop["FMNMX"]
            modelled = sum(loop[each] for each in _CLASSES) + maxima + STATISTICS_SHUFFLES + keys // 4  # conversions
            counts.setdefault((is_fp8, promotes, int(d), int(v or d), keys), loop["instructions"] - modelled)
    return counts


def _step(config: Config) -> _Step:
    d, v = (config.traits.compiled_head_dim(n, config.is_fp8) for n in (config.head_dim, config.head_dim_v))
    return config.is_fp8, config.promotion_interval > 0, d, v, config.tile_n


def estimated(config: object) -> list[str]:
    """Return in words what is estimated of a schedule because nobody compiled such a tile.

    It is empty for a tile that was compiled, and for a backward, which does not use these counts.
    """
    if not isinstance(config, Config) or (config.traits.is_built_here and _step(config) in _counted()):
        return []
    return ["instructions of a step beside its arithmetic"]


def other_instructions(config: Config) -> int:
    """Return how many instructions of a key block are no arithmetic, per warp, counted or estimated.

    For a kernel that is not built here it is the number of its family's table.
    """
    if not config.traits.is_built_here:
        return config.size.other_instructions[config.promotion_interval > 0]
    *size, v, keys = _step(config)
    alike = {step[3:]: count for step, count in _counted().items() if [*step[:3]] == size}
    # the tile with the same channels of V and the same keys, if there is one, else the next best
    return alike[min(alike, key=lambda tile: (tile[0] != v, tile[1] != keys, -tile[0]))]
