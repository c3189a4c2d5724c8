"""What the compiler makes of a forward configuration: where waits end up, and in how many parts P V is summed.

:mod:`fa3_simulator.consumer` writes its programs by these. The record ``TileBlocks`` is used in all of the simulator,
and the names of schedule switches by verbs. The layout of a backward is :mod:`fa3_simulator.backward_schedule`.
"""

from __future__ import annotations

from typing import NamedTuple

from fa3_kernels.plan.config import SWITCHES, Config, Setting

# Without overlap, ptxas puts this share of a block's exponentials in front of handing on the turn: 35 of 66, 14 of 34
# in the two copies of the loop (fp16_d128_no_overlap).
LATE_TURN = 0.5
# Share of the multiplications that rescale O which ptxas puts behind the exponentials, by head_dim, for 16-bit
# operands: 16 of 32 at 64, 32 and 64 of 64 in the two copies of the loop at 128, 64 of 128 at 256.
LATE_RESCALING = {64: 0.5, 128: 0.75, 256: 0.5}


class TileBlocks(NamedTuple):
    """Says how many blocks a tile visits: blocks of keys for a row tile, blocks of rows for a backward's key tile.

    Parameters
    ----------
    blocks : int
        Blocks that the tile visits.
    masked : int
        How many of them are masked element by element.
    """

    blocks: int
    masked: int = 0


def early_exponentials(config: Config) -> float:
    """Return the fraction of a block's exponentials that ptxas issues before it waits for the previous P V.

    It is -1 if the row maxima come after that wait too. ptxas moves the wait, which the source has before or after all
    exponentials; where maxima are taken by integers a branch keeps the order of the source.
    """
    if config.takes_integer_max(False):
        return 0.0
    if config.promotes:
        return 0.0 if config.holds_turn else -1.0
    return config.size.early_exponentials


def late_turn(config: Config) -> float:
    """Return the fraction of a block's exponentials that are issued before the turn is handed on, without overlap."""
    return 0.0 if config.takes_integer_max(False) or config.is_fp8 else LATE_TURN


def late_rescaling(config: Config) -> float:
    """Return the share of the multiplications that rescale O which are not among the exponentials.

    They come behind the exponentials, or in front of them where promoted sums are added. In FlashAttention-3 all are
    among the exponentials.
    """
    if not config.traits.is_built_here:
        return 0.0
    return 1.0 if config.is_fp8 else LATE_RESCALING[next(size for size in LATE_RESCALING if config.head_dim <= size)]


def starts_both(config: Config) -> bool:
    """Tell whether Q K^T of the next block is issued first and the whole of P V behind it.

    It is false for our FP8 kernels where they issue P V in parts in front of Q K^T.
    """
    in_parts = config.is_fp8 and config.traits.promotes
    return not in_parts or (config.overlaps and config.pv_parts == (1, 1)) or config.holds_turn


def copies_queries(config: Config) -> bool:
    """Tell whether consumers copy Q of packed heads themselves, as TMA reads only groups padded to a power of two."""
    return config.pack_gqa and not config.traits.pads_group


WORDS = {"overlap": "overlap (two stages)", "overlap3": "overlap3 (three)"}  # for switches that exclude each other


def switches(config: Config) -> str:
    """Return the names of a configuration's switches, joined as :func:`read_switches` reads them; "none" for no switch.

    >>> switches(Config(softmax_stages=3))
    'pingpong+overlap3'
    """
    names = [
        name
        for choices in SWITCHES
        for name, fields in choices.items()
        if name and all(getattr(config, field) == value for field, value in fields.items())
    ]
    return "+".join(names) or "none"


def read_switches(text: str) -> dict[str, Setting]:
    """Return the fields of a configuration that switches stand for, joined with ``+``, or ``none``.

    Raises
    ------
    ValueError
        For an unknown switch, or for two that exclude each other.

    >>> read_switches("overlap3")
    {'pingpong': False, 'intra_wg_overlap': True, 'softmax_stages': 3}
    """
    names = [] if text == "none" else text.split("+")
    known = [name for choices in SWITCHES for name in choices if name]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"schedule is made of {', '.join(known)}, or none, got {', '.join(unknown)}")
    fields: dict[str, Setting] = {}
    for choices in SWITCHES:
        mine = [name for name in choices if name in names]
        if len(mine) > 1:
            raise ValueError(f"schedule takes {' or '.join(WORDS[name] for name in mine)}, got {text}")
        fields |= choices[mine[0] if mine else ""]
    return fields
