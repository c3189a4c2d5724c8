"""A cycle-approximate simulator of the producer/consumer schedules of attention kernels.

Users may import the names of this module; each is imported when it is first asked for. The verbs are
:func:`fa3verify.simulate` and :func:`fa3verify.tune`.

>>> import fa3_simulator
>>> fa3_simulator.load_machine("h200")["sms"]
132.0
"""

from typing import TYPE_CHECKING

__all__ = ["BackwardSchedule", "Constant", "Estimate", "Machine", "Ranked", "TileBlocks", "load_machine"]

if TYPE_CHECKING:
    from fa3_simulator.backward_schedule import BackwardSchedule
    from fa3_simulator.machine import Constant, Machine, load as load_machine
    from fa3_simulator.run import Estimate
    from fa3_simulator.schedules import TileBlocks
    from fa3_simulator.tune import Ranked
else:
    from fa3_reference.lazy import exporter

    __getattr__, __dir__ = exporter(
        __name__,
        {
            "BackwardSchedule": "fa3_simulator.backward_schedule",
            "Constant": "fa3_simulator.machine",
            "Estimate": "fa3_simulator.run",
            "Machine": "fa3_simulator.machine",
            "Ranked": "fa3_simulator.tune",
            "TileBlocks": "fa3_simulator.schedules",
            "load_machine": "fa3_simulator.machine:load",
        },
    )
