"""Search for the inputs on which a kernel does worst: inputs are bred and judged, and the worst are kept.

``climb`` is the search itself, in which a ``colony`` of inputs climbs a figure; ``forward`` holds what colonies of
forward kernels are made of, how they mutate and how they are judged. ``objectives`` are the figures that are maximised,
``grounds`` the places where a kernel is searched, and ``run`` is the verb hunt.
"""

from fa3verify.search.climb import Find, Findings
from fa3verify.search.objectives import Difference, Objective, OverBaseline, Ratio
from fa3verify.search.run import hunt

__all__ = ["Difference", "Find", "Findings", "Objective", "OverBaseline", "Ratio", "hunt"]
