"""The record of a kernel that bench times, our own kernels with all variants, and the inputs they are timed on.

Peers are made into the same records by :mod:`fa3_reports.bench.peers`; :mod:`fa3_reports.bench.run` times them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import Choices, request_for
from fa3_reference.bounds import KernelModel
from fa3_reports.bench.cells import Cell
from fa3verify.bench import kernels
from fa3verify.known.launches import Given, Keywords, LaunchOutput
from fa3verify.known.libraries import Unsupported
from fa3verify.operations import FORWARD

EVERY = ("fp16", "bf16", "e4m3")
# Good and bad tiles that are timed beside the shipped ones in grid "schedules". 128 x 256 of fp16 spills, and ptxas
# serialises its wgmma.
TILES: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {
    ("fp16", 64): ((128, 64), (128, 128), (128, 256), (192, 64), (192, 128)),
    ("fp16", 128): ((128, 32), (128, 64), (192, 64)),
    ("fp16", 256): ((128, 32),),
    ("e4m3", 64): ((128, 64), (128, 256)),
    ("e4m3", 128): ((128, 32), (128, 64)),
    ("e4m3", 256): ((128, 64),),
}


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A kernel that can be timed.

    Parameters
    ----------
    name : str
        Its name in every table.
    about : str
        A description, with the version.
    dtypes : tuple of str
    prepare : callable
        ``prepare(cell, inputs)`` takes the inputs of :func:`draw` and returns a function ``launch(i)``. That launches
        the kernel on the inputs of number i modulo their count, and returns a LaunchOutput, or the gradients of a
        backward. It raises :class:`Unsupported` for a cell that the kernel does not take.
    configure : callable, optional
        For our forwards: ``configure(cell) -> Config``, with which the twin must give the same bits.
    options : callable, optional
        For our forwards: ``options(cell)`` returns the launch options.
    model : callable, optional
        For peers: ``model(cell) -> KernelModel``, the order of operations whose error bound its output must keep.
    operation : {"forward", "backward"}
    missing : str, optional
        Why it cannot be loaded here.
    belongs : callable
        ``belongs(cell) -> bool``: whether the kernel is to be timed in this cell.
    """

    name: str
    about: str
    dtypes: tuple[str, ...]
    prepare: Callable[[Cell, Sequence[Any]], Callable[[int], Any]]
    configure: Callable[[Cell], Config] | None = None
    options: Callable[[Cell], Keywords] | None = None
    model: Callable[[Cell], KernelModel] | None = None
    operation: str = FORWARD
    missing: str | None = None
    belongs: Callable[[Cell], bool] = lambda cell: True

    def takes(self, cell: Cell) -> bool:
        """Tell whether the kernel belongs in this cell's table at all."""
        return cell.dtype in self.dtypes and self.operation == cell.operation and self.belongs(cell)


def draw(cell: Cell, copies: int, seed: int) -> list[Any]:
    """Draw sets of the operands of a cell on the GPU, as :func:`fa3verify.bench.kernels.draw` does.

    Returns
    -------
    list of Given, or of GivenBackward if a backward is timed
    """
    drawn = kernels.draw(cell.problem, copies, seed, cell.v_mean)
    if cell.operation == FORWARD:
        return list(drawn)
    return [kernels.differentiated(cell.problem, x, i) for i, x in enumerate(drawn)]


def our_kernel(
    name: str,
    about: str,
    dtypes: tuple[str, ...] = EVERY,
    belongs: Callable[[Cell], bool] = lambda cell: True,
    **options: Any,
) -> TimedKernel:
    """Return one of our kernels, or with launch options a variant of it, as a record to be timed."""

    def configure(cell: Cell) -> Config:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        choices = Choices(**(_defaults(cell) | options))
        return plan_of(request_for(cell.problem, choices), sms).config

    def prepare(cell: Cell, inputs: Sequence[Given]) -> Callable[[int], LaunchOutput]:
        launch = kernels.our_launch(cell.problem, inputs, Choices(**(_defaults(cell) | options)))
        try:
            launch(0)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        return lambda i: LaunchOutput(*launch(i))

    return TimedKernel(name, about, dtypes, prepare, configure, lambda cell: _defaults(cell) | options, belongs=belongs)


def _defaults(cell: Cell) -> Keywords:
    """Return the launch options that all our kernels have in a cell.

    Few queries leave most of the GPU idle, so that the launch chooses the splits in grid "decode" and over a cache. In
    grid "schedules" heads are never packed, as the rows of its table do not say whether they are.
    """
    if cell.grid == "decode" or cell.line:
        return {"num_splits": 0}
    return {"pack_gqa": False} if cell.grid == "schedules" else {}


def _is_varied(cell: Cell) -> bool:
    """Tell whether schedules are tried out in this cell."""
    return cell.grid == "schedules" and cell.dtype != "bf16"


def _is_ablated(cell: Cell) -> bool:
    return _is_varied(cell) or (cell.grid == "ablation" and cell.dtype != "e4m3")


def _takes_turns(cell: Cell) -> bool:
    return default_config(cell.problem).pingpong


def _has_overlap(cell: Cell) -> bool:
    """Tell whether overlap is switched off in this cell; e4m3 at head_dim 256 has none."""
    return _is_ablated(cell) and (cell.dtype, cell.head_dim) != ("e4m3", 256)


def _has_lockstep(cell: Cell) -> bool:
    return cell.grid == "ablation" or (_is_varied(cell) and (cell.dtype, cell.head_dim) == ("fp16", 128))


def _tries(tile: tuple[int, int]) -> Callable[[Cell], bool]:
    """Return a function that tells whether a tile is tried in a cell: it is listed, and not the one that ships."""

    def belongs(cell: Cell) -> bool:
        shipped = default_config(cell.problem)
        is_listed = tile in TILES.get((cell.dtype, cell.head_dim), ())
        return _is_varied(cell) and is_listed and tile != (shipped.tile_m, shipped.tile_n)

    return belongs


def _tiles() -> list[TimedKernel]:
    """Return our kernels with other tiles; 128 x 64 also with every overlap switched off."""
    timed = []
    for tile in sorted({tile for tiles in TILES.values() for tile in tiles}):
        name = f"gluon.{tile[0]}x{tile[1]}"
        about = f"this package, tiles of {tile[0]} x {tile[1]}"
        timed.append(our_kernel(name, about, belongs=_tries(tile), tile=tile))
        if tile == (128, 64):
            timed.append(
                our_kernel(
                    f"{name}.serial",
                    f"{about}, no overlap",
                    belongs=_tries(tile),
                    tile=tile,
                    pingpong=False,
                    intra_wg_overlap=False,
                )
            )
    return timed


def ours() -> list[TimedKernel]:
    """Return our forwards: as shipped, FP8 without promotion, with parts of the schedule off, and with other tiles."""
    rest = ("fp16", "bf16")
    return [
        our_kernel("gluon", "this package, as shipped"),
        our_kernel("gluon.chained", "this package, FP8 without promotion to fp32", ("e4m3",), promotion_interval=0),
        our_kernel(
            "gluon.one_split", "this package, keys not split", belongs=lambda c: c.grid == "decode", num_splits=1
        ),
        our_kernel(
            "gluon.no_pingpong",
            "this package, warpgroups not taking turns",
            belongs=lambda c: _is_ablated(c) and _takes_turns(c),
            pingpong=False,
        ),
        our_kernel(
            "gluon.pingpong",
            "this package, warpgroups taking turns",
            belongs=lambda c: _is_ablated(c) and not _takes_turns(c),
            pingpong=True,
        ),
        our_kernel(
            "gluon.no_overlap",
            "this package, softmax not under the GEMMs",
            belongs=_has_overlap,
            intra_wg_overlap=False,
        ),
        our_kernel(
            "gluon.no_specialisation", "this package, no producer warp", rest, _has_lockstep, warp_specialize=False
        ),
        *_tiles(),
    ]
