"""Hunt: a targeted search for the input of which any kernel errs most, or on which two kernels differ most.

``objectives`` are what is maximised, ``grounds`` where; ``search`` is one search, led or at random, ``colonies`` make
any forward kernel what :mod:`fa3verify.adversary` evolves, and ``run`` shares a budget among processes.
"""

from fa3verify.adversary.climb import Find, Findings
from fa3verify.hunt.objectives import Difference, Objective, OverBaseline, Ratio
from fa3verify.hunt.run import hunt

__all__ = ["Difference", "Find", "Findings", "Objective", "OverBaseline", "Ratio", "hunt"]
