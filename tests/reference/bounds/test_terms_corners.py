"""Terms of the a-priori bound that only its corners show: small problems beside the domain's end, and what is promised.

The numbers are pinned, in corners.json, as the bound had them when every term had been looked at; why each corner is
there stands in its name. ``python -m tests.bless corners`` writes them anew.
"""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reference.bounds.forward import forward_bound
from tests.reference.bounds.corners import CORNERS, model_of, operands_of, sums


@pytest.mark.parametrize("name", CORNERS)
def test_the_bound_of_a_corner_is_what_it_was(name: str) -> None:
    np.testing.assert_allclose(sums(CORNERS[name]), CORNERS[name]["sums"], rtol=5e-10, atol=0)


@pytest.mark.parametrize("name", [name for name, corner in CORNERS.items() if "promised" in corner])
def test_a_corner_is_promised_what_its_domain_says(name: str) -> None:
    """ "nothing" of any row that sees a key, "something" of all, or that lse is "exact"."""
    corner = CORNERS[name]
    problem, operands = operands_of(corner)
    bound = forward_bound(problem, operands, model_of(corner))
    rows = np.arange(problem.seqlen_q)
    first, stop = problem.visible_keys(rows, problem.seqlen_q, problem.seqlen_k)
    empty = stop <= first
    assert (bound.out[0, empty] == 0).all()
    assert (bound.lse[0, :, empty] == 0).all()
    seen = bound.out[0, ~empty]
    assert (np.isfinite(seen) == (corner["promised"] != "nothing")).all()
    assert (bound.lse == 0).all() or corner["promised"] != "exact"
