from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.machine import Constant, Machine, load as load_machine
from fa3_simulator.run import Estimate
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.tune import Ranked

__all__ = ["BackwardSchedule", "Constant", "Estimate", "Machine", "Ranked", "TileBlocks", "load_machine"]
