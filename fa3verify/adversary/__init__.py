"""Adversary: inputs that are bred to break the error bound of a correct kernel.

``islands`` are shapes and configurations; a ``colony`` is what is judged at once; ``scores``, ``values`` and
``surroundings`` mutate it, led by a ``guide``; ``evolve`` selects and ``run`` searches all islands on many processes.
``gradients`` does the same for the backward, on whole small problems; ``climb`` is what both share.
"""

from fa3verify.adversary.climb import Find, Findings
from fa3verify.adversary.evolve import Search
from fa3verify.adversary.islands import ISLANDS, Island, islands_of

__all__ = ["ISLANDS", "Find", "Findings", "Island", "Search", "islands_of"]
