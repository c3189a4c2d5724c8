"""Compare: whether two kernels, two configurations, or one kernel in two calls return the same bits.

``axes`` lists what may change between two calls of a serving stack (with the ``problems`` that are compared), ``bits``
finds the first output that differs, ``run`` goes over inputs and explains a difference by the launches, and ``table``
prints which changes leave all bits alone. ``proof`` decides by plans instead of runs.
"""

from fa3verify.compare.run import Compared, compare_kernels, compare_over

__all__ = ["Compared", "compare_kernels", "compare_over"]
