"""Compare: whether two kernels, two configurations, or one kernel in two calls return the same bits.

``axes`` are what may change between two calls of a serving stack, ``bits`` find the first output that differs,
``reasons`` say what of a launch differs, ``run`` goes over inputs and ``table`` prints what may change without changing
a bit.
"""

from fa3verify.compare.run import Compared, compare_kernels, compare_over

__all__ = ["Compared", "compare_kernels", "compare_over"]
