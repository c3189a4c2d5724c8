"""Proof whether the bits of a row depend on more than its own operands, decided by the plans of launches.

``row`` extracts from a plan what decides the bits of one row, ``plans`` makes plans of batches, ``classes`` enumerates
the statistics of batches and searches batches of up to three sequences for a counterexample, ``confirm`` runs calls of
both sides of a class boundary, ``answers`` finds the answer, and ``words`` prints it.
"""

from fa3verify.compare.proof.answers import BitsProof, prove
from fa3verify.compare.proof.classes import BatchLimits

__all__ = ["BatchLimits", "BitsProof", "prove"]
