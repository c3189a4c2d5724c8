"""Search: inputs are bred for what a kernel does worst on them, judged, and the worst are kept.

A ``colony`` of inputs climbs an objective (``climb``); those of the ``forward`` say how they are executed and what of
them mutates. ``grounds`` are where a kernel is searched, ``objectives`` what is maximised; ``run`` is the verb hunt.
"""

from fa3verify.search.findings import Find, Findings
from fa3verify.search.objectives import Difference, Objective, OverBaseline, Ratio
from fa3verify.search.run import hunt

__all__ = ["Difference", "Find", "Findings", "Objective", "OverBaseline", "Ratio", "hunt"]
