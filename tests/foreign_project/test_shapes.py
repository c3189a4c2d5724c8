"""A test of the repository's own, on a shape that its users have."""

import numpy as np

import fa3verify


def test_one_query_over_a_cache(fa3_kernel, fa3_truth, fa3_bound):
    problem = fa3verify.AttentionProblem(1, 2, 2, 1, 200, 64)
    case = fa3verify.Case(fa3_kernel.name, problem, fa3verify.Recipe("normal", seed=3))
    out = fa3verify.judge(fa3_kernel, case).outputs["out"]
    assert np.all(abs(out - fa3_truth(case)["out"]) <= fa3_bound(case)["out"])
