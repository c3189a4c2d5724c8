"""Compare: whether two kernels, two configurations, or one kernel in two calls return the same bits.

``axes`` lists what may change between two calls of a serving stack (with the ``problems`` that are compared), ``run``
goes over inputs, finds the first output that differs and explains it by the launches, and ``tasks`` makes tasks of it
for the verb. ``proof`` decides by plans instead of runs.
"""

from fa3verify.compare.run import Compared, compare_kernels, compare_over

__all__ = ["Compared", "compare_kernels", "compare_over"]
