"""Instructions of a step that are no arithmetic, as ptxas compiled them: addresses and descriptors of wgmma, moves,
predicates, branches.

Of a tile of our own kernels they are counted in the accepted code (``fa3_kernels/audit/audit.json``): what is left of a
loop without a mask when the arithmetic that the simulator charges by itself is taken away. Rows of a tile do not
matter, as a warpgroup has 64 of them. A tile that nobody compiled is taken to have as many as another one of its size.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from fa3_kernels.audit.evidence import accepted_rows
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS, traits_of

# Per key block and warp, of what each lane keeps of its two rows: the running maximum and the factor that rescales the
# sums.
STATISTICS_ALU = 6
STATISTICS_MUFU = 2
STATISTICS_SHUFFLES = 4
_PLAIN = re.compile(r"(fp16|e4m3)_d(\d+)(?:_v(\d+))?_dense(_chained)?(?:_128_rows)?/forward_fp\d+")
_CLASSES = ("HGMMA", "QGMMA", "MUFU.EX2", "FFMA", "FMUL", "FADD", "BAR")
_Step = tuple[bool, bool, int, int, int]  # is e4m3, sums are promoted, channels of Q and of V, keys of a tile


@cache
def _counted() -> dict[_Step, int]:
    """Return the count of every tile that was compiled; of two with as many keys, that of the taller one.

    Where maxima are taken by integers, the loop holds both ways to take them, with the shuffles of each. The other one
    is not run, but for two comparisons behind it.
    """
    found: dict[_Step, int] = {}
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
            found.setdefault((is_fp8, promotes, int(d), int(v or d), keys), loop["instructions"] - modelled)
    return found


def _step(config: Config) -> _Step:
    d, v = (config.traits.compiled_head_dim(n, config.is_fp8) for n in (config.head_dim, config.head_dim_v))
    return config.is_fp8, config.promotion_interval > 0, d, v, config.tile_n


def estimated(config: object) -> list[str]:
    """Name what is estimated of a schedule, as nobody compiled such a tile; of a backward nothing is counted so."""
    if not isinstance(config, Config) or (config.traits.is_built_here and _step(config) in _counted()):
        return []
    return ["instructions of a step beside its arithmetic"]


def other_instructions(config: Config) -> int:
    """Return the instructions of a step that are no arithmetic, counted or estimated."""
    if not config.traits.is_built_here:
        return config.size.other_instructions[config.promotion_interval > 0]
    *size, v, keys = _step(config)
    alike = {step[3:]: count for step, count in _counted().items() if [*step[:3]] == size}
    return alike[min(alike, key=lambda tile: (tile[0] != v, tile[1] != keys, -tile[0]))]
