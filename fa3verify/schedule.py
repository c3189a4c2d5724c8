"""The words in which anybody describes the pipeline of a kernel, for ``simulate``, ``hazards`` and ``tune``.

See ``docs/schedule.md``.
"""

from fa3_simulator.description import Description, Schedule, kernel
from fa3_simulator.launch import Launch
from fa3_simulator.rings import Ring, Stage
from fa3_simulator.schedule import Cta, Warps
from fa3_simulator.schedules import TileBlocks

__all__ = ["Cta", "Description", "Launch", "Ring", "Schedule", "Stage", "TileBlocks", "Warps", "kernel"]
