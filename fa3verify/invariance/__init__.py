"""Invariance: what the bits of a row depend on beside its own operands, decided over the plan of a launch.

``row`` says what of a plan decides the bits of one row, ``plans`` make plans of batches, ``classes`` enumerate the
statistics of batches and search every batch of three sequences for a counterexample, ``confirm`` runs both sides of a
class boundary, and ``answer`` holds what is told.
"""

from fa3verify.invariance.answer import Invariance, invariance
from fa3verify.invariance.classes import BatchLimits

__all__ = ["BatchLimits", "Invariance", "invariance"]
