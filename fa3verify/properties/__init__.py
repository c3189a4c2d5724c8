"""Properties of correct attention kernels, each a :class:`Law` in code, and the search for trials that break one.

``law`` defines laws and trials, ``trials`` draws trials, checks are made of ``compare`` and ``transforms``, and
``runner`` searches. All other modules state laws, which ``table`` lists. The check of a law is a generator
``check(setup, trial)``: it runs the kernel on transformed calls and yields a :class:`Violation`, or None, for each
comparison. It raises :class:`~fa3verify.properties.law.Untaken` if the kernel takes no such call, and ValueError for a
parameter of a stored trial that is not legal.
"""

from fa3verify.properties.law import SCHEMA as SCHEMA, Law as Law, Trial as Trial, Violation as Violation
from fa3verify.properties.policy import POLICY as POLICY, Rule as Rule
from fa3verify.properties.runner import (
    LawOutcome as LawOutcome,
    find_law as find_law,
    replay_trial as replay_trial,
    run_law as run_law,
)
from fa3verify.properties.table import LAWS as LAWS, check_claims as check_claims
