"""This module says where a kernel is hunted: islands, of which arrays are bred, and cases, of which everything else is
drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.traits import OURS
from fa3verify.kernels.record import Candidate
from fa3verify.operations import FORWARD
from fa3verify.properties.trials import LONG, Wanted
from fa3verify.search.forward.islands import Island


@dataclass(frozen=True, slots=True)
class Ground:
    """One place: islands, which share what is searched, or what cases are wanted."""

    name: str
    islands: tuple[Island, ...] = ()
    wanted: Wanted = field(default_factory=Wanted)


# Few keys let a single operation's error stand alone, several tiles rescale, thousands let errors of one sign add up.
# Format, tile, rows and channels are those of a kernel.
_SHAPES = (
    Island("few", "fp16", 16, 128),
    Island("tile", "fp16", 128, 128),
    Island("tiles", "fp16", 384, 128),
    Island("long", "fp16", 2048, 128),
    Island("splits", "fp16", 512, 128, num_splits=3),
    Island("softcap", "fp16", 64, 128, softcap=True),
    Island("causal", "fp16", 160, 128, causal=True),
)
# Rows of one batch with channels of their own: few of them make scores that are all but exact, and cost little time.
_BY_ROW: tuple[dict[str, int], ...] = (
    {"rows": 16, "width": 1, "columns": 32},
    {"rows": 16, "width": 1, "columns": 16},
    {"rows": 16, "width": 4, "columns": 64},
    {"rows": 16, "width": 8, "columns": 128},
    {"rows": 64, "width": 1, "columns": 64},
)
# Rows of batches of their own, whose scores are chains of many products, which the tensor core cuts. Kernels of e4m3
# that take one descale a sequence have only these, so that the descale of a row is its own.
_BY_BATCH: tuple[dict[str, int], ...] = (
    {"batch": 16, "rows": 1, "width": 16, "columns": 16},
    {"batch": 16, "rows": 1, "width": 64, "columns": 64},
    {"batch": 16, "rows": 1, "width": 128, "columns": 128},
)
_CHAINS: tuple[dict[str, int], ...] = ({"batch": 16, "rows": 1, "width": 64, "columns": 64}, *_BY_BATCH[2:])
_CASES = (Ground("cases"), Ground("long cases", wanted=Wanted(seqlens_k=LONG, longest_q=4, empty=False)))


def grounds_of(candidate: Candidate, others: tuple[Candidate, ...] = ()) -> tuple[Ground, ...]:
    """Return where a kernel can be hunted, together with others; islands of forward kernels only."""
    if candidate.operation != FORWARD:
        return _CASES[:1]
    kernels = (candidate, *others)
    by_batch = candidate.dtype == "e4m3" and not all("block_descale" in each.features for each in kernels)
    layouts = (_BY_BATCH,) if by_batch else (_BY_ROW, _BY_BATCH)
    found = [(shape, [_island(kernels, shape, each) for each in layouts]) for shape in _SHAPES]
    chains = Island("chains", "fp16", 16, 128)
    found.append((chains, [_island(kernels, chains, _CHAINS)]))
    grounds = [Ground(shape.name, tuple(island for island in islands if island)) for shape, islands in found]
    return *(ground for ground in grounds if ground.islands), *_CASES


def ground_of(candidate: Candidate, name: str, others: tuple[Candidate, ...] = ()) -> Ground:
    """Return the ground of a name; ValueError where a kernel has none."""
    known = {ground.name: ground for ground in grounds_of(candidate, others)}
    if name not in known:
        raise ValueError(f"ground of {candidate.name} must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _island(kernels: tuple[Candidate, ...], shape: Island, layouts: tuple[dict[str, int], ...]) -> Island | None:
    """An island of the first layout that all kernels take, with the first one's tile; None where they take none."""
    if shape.num_splits > 1 and not all("num_splits" in kernel.changeable for kernel in kernels):
        return None
    if shape.causal and any(kernel.policy.causal == "top_left" for kernel in kernels):
        return None
    first = kernels[0]
    multiple = max(kernel.seqlen_multiple for kernel in kernels)
    keys = -(-shape.keys // multiple) * multiple
    for layout in layouts:
        island = replace(shape, dtype=first.dtype, keys=keys, **layout)
        problem = island.problem(1.0, 1.0)
        if all(kernel.refusal(problem) is None for kernel in kernels):
            config = first.config_for(problem)
            return _configured(island, config) if isinstance(config, Config) else island
    return None


def _configured(island: Island, config: Config) -> Island:
    """An island with what leads its mutations: the tile, promotion and family of a configuration."""
    known = config.family if config.traits.is_reproduced else OURS
    choices = {"promotion_interval": config.promotion_interval, "out_dtype": config.out_dtype}
    blocks = {"descale_tiles": 1} if island.dtype == "e4m3" and island.rows > 1 else {}
    return replace(island, tile_n=config.tile_n, family=known, **choices, **blocks)
