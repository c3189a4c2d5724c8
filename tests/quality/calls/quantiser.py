"""Wrong quantisers to e4m3: our twin's, whose outputs or inputs are changed.

No decorator declares a quantiser: each is a function without arguments that returns a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import fa3verify
from fa3_reference.problem import Operands
from tests.quality.calls.exhibits import EXHIBITS, Exhibit, named
from tests.quality.calls.plain import F

Run = Callable[[Any, Operands, Any], Any]
TWIN = fa3verify.find_kernel("twin.quantize")
OUTPUTS = ("q", "k", "v", "q_descale", "k_descale", "v_descale")


def differs(changes: dict[str, Any], spoil: Callable[[np.ndarray], np.ndarray] | None = None, **sizes: Any):
    """Return a witness: whether codes or descales of K differ from our twin's, where ``spoil`` changed K first."""

    def witness(exhibit: Exhibit) -> bool:
        given = {"batch": 1, "nheads": 1, "nheads_kv": 1, "seqlen_q": 4, "seqlen_k": 40, "head_dim": 64} | sizes
        problem = fa3verify.AttentionProblem(**given, dtype="e4m3")
        config = TWIN.code.configure(problem)
        config = replace(config, **changes)
        rng = np.random.default_rng(0)
        q, k, v = (
            rng.standard_normal(s, F).astype(np.float16) for s in (problem.q_shape, problem.k_shape, problem.v_shape)
        )
        operands = Operands(q, spoil(k) if spoil else k, v)
        got, want = (kernel.code.run(problem, operands, config) for kernel in (exhibit.function(), TWIN))
        return any(np.asarray(getattr(got, n)).tobytes() != np.asarray(getattr(want, n)).tobytes() for n in OUTPUTS)

    return witness


def quantiser(words: str, witness: Callable[[Exhibit], bool]) -> Callable[[Run], Callable[[], fa3verify.Kernel]]:
    """Keep a quantiser whose function runs another thing than the twin."""

    def declare(run: Run) -> Callable[[], fa3verify.Kernel]:
        def made() -> fa3verify.Kernel:
            return replace(TWIN.altered(run=run), name=run.__name__)

        name = run.__name__
        run.__name__ = run.__qualname__ = f"_{name}"
        globals()[f"_{name}"] = run
        EXHIBITS[name] = Exhibit("quantiser", words, named(globals(), made, name), {"library": "numpy"}, witness)
        return made

    return declare


def run_twin(problem: Any, operands: Operands, config: Any) -> Any:
    """Return what the twin returns."""
    return TWIN.code.run(problem, operands, config)


def coded(found: Any, **arrays: np.ndarray) -> Any:
    """Return the twin's outputs with others in the place of some."""
    return replace(found, **arrays)


@quantiser("NaN is stored as 0", differs({}, lambda k: np.where(np.arange(64) == 3, np.float16(np.nan), k)))
def nan_as_zero(problem, operands, config):
    found = run_twin(problem, operands, config)
    cleaned = {name: getattr(found, name) for name in "qkv"}
    return coded(found, **{name: np.where(np.isnan(x.astype(F)), x.dtype.type(0), x) for name, x in cleaned.items()})


@quantiser(
    "an infinity is left out of the largest magnitude",
    differs({}, lambda k: np.where(np.arange(64) == 3, np.float16(np.inf), k)),
)
def infinity_left_out(problem, operands, config):
    arrays = {name: getattr(operands, name) for name in "qkv"}
    clipped = {name: np.where(np.isinf(x), x.dtype.type(1), x) for name, x in arrays.items()}
    return run_twin(problem, replace(operands, **clipped), config)


@quantiser("a block of zeros has a descale of 0", differs({}, lambda k: 0 * k))
def zero_descale(problem, operands, config):
    found = run_twin(problem, operands, config)
    is_zero = not np.asarray(operands.k).astype(F).any()
    return coded(found, k_descale=np.zeros_like(found.k_descale)) if is_zero else found


@quantiser("seeds of the rotation are held in 8 bits", differs({"rotate": True, "seed": 300}))
def seeds_of_8_bits(problem, operands, config):
    return run_twin(problem, operands, replace(config, seed=config.seed & 255))


@quantiser("descales of heads from 40 on are those of head 39", differs({"scope": "head"}, nheads=44, nheads_kv=44))
def heads_from_40(problem, operands, config):
    found = run_twin(problem, operands, config)
    heads = np.minimum(np.arange(found.k_descale.shape[1]), 39)
    return coded(found, k_descale=found.k_descale[:, heads])


@quantiser("blocks of 256 rows and more share the descale of the first 128", differs({"block_rows": 256}, seqlen_k=300))
def large_blocks(problem, operands, config):
    found = run_twin(problem, operands, config)
    if config.descale_rows[1] < 256:
        return found
    return coded(found, k_descale=found.k_descale * F(0.75))


@quantiser("rows of K from 20,000 on keep the codes of the rows before", differs({}, seqlen_k=20_100))
def late_rows(problem, operands, config):
    found = run_twin(problem, operands, config)
    k = found.k.copy()
    if k.ndim == 4 and k.shape[1] > 20_000:
        k[:, 20_000:] = k[:, 20_000 - 1 : -1]
    return coded(found, k=k)
