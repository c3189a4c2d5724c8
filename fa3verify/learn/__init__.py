"""Find a kernel's order of operations from its outputs alone.

A hypothesis is a tile, a direction, an interval of promotion and an :class:`fa3_kernels.plan.order.Order`: the twin of
it has bits of its own. :mod:`fa3verify.learn.probes` reads off what a single launch of chosen inputs decides,
:mod:`fa3verify.learn.elimination` launches what the remaining hypotheses disagree on, and
:mod:`fa3verify.learn.learner` says what is left: an equivalence class, or that no hypothesis survives and what is
certain all the same. What is found is a proposal, and acquits no kernel.
"""

from fa3verify.learn.learner import Learned, learn

__all__ = ["Learned", "learn"]
