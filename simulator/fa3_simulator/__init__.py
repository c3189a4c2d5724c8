"""A cycle-approximate simulator of the producer/consumer schedules of attention kernels.

Users may import the names of this module; each is imported when it is first asked for. The verbs are
:func:`fa3verify.simulate` and :func:`fa3verify.tune`.

>>> import fa3_simulator
>>> fa3_simulator.load_machine("h200")["sms"]
132.0
"""

from fa3_reference.lazy import exporter

__getattr__, __dir__ = exporter(__name__)
