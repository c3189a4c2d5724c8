"""The CPU twin: every kernel's arithmetic, bit for bit, in numpy and numba."""
