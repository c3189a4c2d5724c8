"""The a-priori bound of a forward with some of its sources of error weighed: removed by 0, halved by 0.5.

Controls of the bound weigh one source, and find an input whose error exceeds what is left. The bound itself knows no
weights: the terms that the lines below mark are multiplied in its code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import CodeType, FunctionType, ModuleType

from fa3_reference.bounds import epilogue, forward, forward_sums, forward_weights, head, steps
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Operands
from tests.quality.edited_code import Edit, edited, running

# By module, in « » where a source stands, each line as ast.unparse writes it and once in its module.
SOURCES: dict[str, tuple[tuple[ModuleType, str], ...]] = {
    # cuts of the tensor core in Q K^T
    "scores": ((head, "ds = «ds» + noise"),),
    # roundings of the factor that takes scores to log2 units
    "factor": ((head, "eta = «eta» * OUTWARD"),),
    # rounding of x - M
    "exponent": (
        (forward, "return «(gamma(_SINK_ROUNDINGS) + LG2_REL) * (size + of_keys + _OFFSET)» + kept * size"),
        (forward_weights, "dx = dx + «U_FP32 * (np.abs(x) + dx)»"),
        (forward_weights, "return LN2 * (dx + «U_FP32 * (_exponent(y, model) + within)») + exp"),
        (forward_weights, "r = LN2 * (dx + «binary32_error(exponent - within, exponent + within)») + exp"),
    ),
    # the exponential of weights
    "exp": (
        (
            forward,
            "r = LN2 * (sink_error(sink, state.max, model) + 2 * state.tau) + «log_error(model.exp_error)»",
        ),
        (forward_weights, "exp = «log_error(model.exp_error)»"),
    ),
    # the factor of a moved maximum, and its product with O
    "rescale": (
        (forward, "a = np.where(moved, «log_error(model.exp_error) + LN2 * exponent», 0.0)"),
        (forward_sums, "lost = lost + «carried * rescaled * OUTWARD»"),
    ),
    # of P to its format
    "p_rounding": (
        (forward_weights, "relative = «rounding» / np.where(p > 0, p, 1.0)"),
        (forward_weights, "return BlockWeights(p, visible, either, down, «rounding», unit, counts, *grids)"),
        (epilogue, "lost = «model.p_format.unit_roundoff + state.keys * model.p_format.min_subnormal / 2»"),
    ),
    # cuts of P V: of products as they are aligned, and of their sums
    "products": (
        (forward_sums, "lost = «np.where(exact.products, 0.0, products)» + np.where(exact.sums, 0.0, sums)"),
        (forward_sums, "return np.minimum(«products», carried + added) + np.minimum(sums, carried + added)"),
    ),
    "sums": (
        (forward_sums, "tree = «gamma(int(keys.max()) + 1, unit) * (added + np.where(added > 0, carried, 0.0))»"),
        (forward_sums, "lost = np.where(exact.products, 0.0, products) + «np.where(exact.sums, 0.0, sums)»"),
        (forward_sums, "return np.minimum(products, carried + added) + «np.minimum(sums, carried + added)»"),
    ),
    # additions of promoted sums in binary32
    "promotion": ((forward_sums, "lost = lost + «np.where(inexact, chunks * U_FP32 * (rounded_sum + lost), 0.0)»"),),
    "row_sum": (
        (forward, "lost = «np.where(p > 0, U_FP32 * (state.l + state.l_up + state.l_error), 0.0)»"),
        (forward_sums, "lost = «gamma(depth) * chain + U_FP32 * total * (1 + gamma(depth))»"),
        (epilogue, "error = state.l_error + «gamma(2) * (weights + state.l_error)»"),
        (
            epilogue,
            "error = np.minimum(error, «np.where(roundings < 0.5, roundings / (1 - roundings), np.inf) * weights»)",
        ),
    ),
    # with the last multiplications
    "reciprocal": (
        (forward, "state.l_error = state.l_error + «gamma(_SINK_APART) * state.l»"),
        (epilogue, "divides = «(RCP_REL + (1 + head.v_scaled) * U_FP32) * (1 + 2.0 ** (-20))»"),
        (epilogue, "epilogue = np.where(is_power, «descale_rounds * U_FP32», divides)"),
    ),
    # the logarithm, and the two roundings after it
    "lg2": (
        (epilogue, "error = log_l * LOG2_E + np.where(is_exact, 0.0, «LG2_ABS + LG2_REL * magnitude»)"),
        (epilogue, "lg2 = «LG2_ABS + LG2_REL * (np.abs(np.log2(total)) + relative)»"),
    ),
    "lse": (
        (epilogue, "return (lse, (error + «rounding») * OUTWARD)"),
        (epilogue, "return (error + «gamma(2) * (lse + error)») * OUTWARD"),
        (epilogue, "constant = «_LN2_REL * (lse + error)»"),
        (epilogue, "return (error + «binary32_error(lse - error, lse + error)») * OUTWARD"),
        (epilogue, "lse_out = lse_out + «binary32_error(merged_lse - lse_out, merged_lse + lse_out)»"),
    ),
    # of splits
    "combine": (
        (epilogue, "omega = LN2 * lse_error + «weighed»"),
        (epilogue, "roundings = «(gamma(2 * len(parts) + (not model.is_stated)) + RCP_REL) * (1 + 2.0 ** (-20))»"),
        (epilogue, "relative = np.maximum(relative, -np.log2(least[:, 0] / total)) + «gamma(len(parts) - 1) * LOG2_E»"),
        (epilogue, "return «np.expm1(again + shift) * OUTWARD»"),
    ),
    # the tanh
    "softcap": ((steps, "own = «own * (1 + 2.0 ** (-20))»"),),
}


@cache
def _edited(weights: tuple[tuple[str, float], ...]) -> list[tuple[FunctionType, CodeType]]:
    for name, _ in weights:
        if name not in SOURCES:
            raise ValueError(f"a source of error must be one of {', '.join(SOURCES)}, got {name!r}")
    places = [(module, line, f"{weight!r} * ({{}})") for name, weight in weights for module, line in SOURCES[name]]
    return edited([Edit(*place) for place in places])


def weighed(**weights: float) -> AbstractContextManager[None]:
    """Let the bound charge sources of error by these weights, by names of SOURCES; the others count once.

    Raises
    ------
    ValueError
        If there is no such source, or a line of it is not in the code exactly once.
    """
    return running(_edited(tuple(weights.items())))


def weighed_bound(**weights: float) -> Callable[[AttentionProblem, Operands, KernelModel], ErrorBound]:
    """Return forward_bound with its sources of error so weighed."""

    def bound(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
        with weighed(**weights):
            return forward_bound(problem, operands, model)

    return bound
