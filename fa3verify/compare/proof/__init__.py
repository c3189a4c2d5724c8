"""Proof: what the bits of a row depend on beside its own operands, decided over the plan of a launch.

``row`` says what of a plan decides the bits of one row, ``plans`` make plans of batches, ``classes`` enumerate the
statistics of batches and search every batch of three sequences for a counterexample, ``confirm`` runs both sides of a
class boundary, ``prove`` holds the answer, and ``words`` say it.
"""

from fa3verify.compare.proof.classes import BatchLimits
from fa3verify.compare.proof.prove import BitsProof, prove

__all__ = ["BatchLimits", "BitsProof", "prove"]
