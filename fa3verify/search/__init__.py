"""Search: inputs are bred for what a kernel does worst on them, judged, and the worst are kept.

A ``colony`` of inputs climbs an objective (``climb``). Colonies of the ``forward`` and of ``gradients`` differ in what
they hold, how they are executed and what of them mutates. ``grounds`` are where a kernel is searched, ``objectives``
what is maximised; the verb hunt takes any kernel (``run``), the verb adversary our twins (``adversary``).
"""

from fa3verify.search.findings import Find, Findings
from fa3verify.search.objectives import Difference, Objective, OverBaseline, Ratio
from fa3verify.search.run import hunt

__all__ = ["Difference", "Find", "Findings", "Objective", "OverBaseline", "Ratio", "hunt"]
