"""Find a kernel's order of operations from its outputs alone.

A hypothesis is a tile, a direction, an interval of promotion and an :class:`fa3_kernels.plan.order.Order`; each
hypothesis has a twin with bits of its own. :mod:`fa3verify.learn.probes` finds what a single launch of chosen inputs
decides, and :mod:`fa3verify.learn.elimination` makes launches on which the remaining hypotheses disagree.
:mod:`fa3verify.learn.learner` does both and returns the hypotheses that are left, which no launch separates, or none,
and what is certain in either case. A learned order is a proposal; it does not make a kernel pass.
"""

from fa3verify.learn.learner import Learned, learn

__all__ = ["Learned", "learn"]
