"""Programs of the kernels that ship, as the simulator takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa3_kernels.plan.config import Config
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.cta import BackwardKernel, ForwardKernel
from fa3_simulator.program import Op, Program
from fa3_simulator.schedules import TileBlocks


def forward(config: Config, tiles: Sequence[TileBlocks]) -> Program:
    return ForwardKernel(config).program(tiles)


def backward(schedule: BackwardSchedule, tiles: Sequence[TileBlocks], *, adds_gradients: bool = False) -> Program:
    return BackwardKernel(schedule, adds_gradients).program(tiles)


def spelled_out(program: Program, strip: Callable[[Any], Any] = lambda item: item) -> list[list[tuple]]:
    """Operations of every actor with what their indices stand for, of which ``strip`` leaves something."""
    p = program
    lists = {
        Op.VECTOR: (p.works,),
        Op.WGMMA: (p.gemms, p.slots, p.slots, p.slots),
        Op.EXPECT: (p.mbarriers,),
        Op.LOAD: (p.mbarriers, None, p.slots),
        Op.STORE: (None, p.slots),
        Op.ARRIVE: (p.mbarriers,),
        Op.WAIT: (p.mbarriers,),
        Op.BAR_ARRIVE: (p.named_barriers,),
        Op.BAR_SYNC: (p.named_barriers,),
        Op.DELAY: (p.delays,),
        Op.READ: (p.slots,),
        Op.WRITE: (p.slots,),
        Op.MARK: (p.labels,),
    }

    def words(kind: int, *operands: int) -> tuple:
        known = (*lists.get(Op(kind), ()), None, None, None, None)
        return Op(kind), *(
            x if each is None or x < 0 else strip(each[x]) for x, each in zip(operands, known, strict=False)
        )

    return [[words(*row) for row in actor.ops.tolist()] for actor in p.actors]
