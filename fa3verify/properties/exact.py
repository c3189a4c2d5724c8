"""Laws of one call that hold bit for bit, in out and lse: exact scalings, signs, channels, and repetition.

Laws about shapes and schedules stand in :mod:`fa3verify.properties.structure`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fa3_reference.formats import FORMATS
from fa3_reference.problem import Descale
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.kernels.record import Kernel
from fa3verify.properties.compare import Found, same_bits, same_values
from fa3verify.properties.law import Drawn, Setup, Trial
from fa3verify.properties.transforms import kept, rescaled, scaled_by_power_of_two
from fa3verify.properties.trials import Wanted, drawn, law, needs

ROOM = 3  # powers of two that a value may move; e4m3 has 15 binades
_EXPONENTS = st.sampled_from((1, -1, 2, -2, ROOM, -ROOM))


def _value_scaling(setup: Setup, trial: Trial) -> Found:
    n = trial.integer("exponent", -ROOM, ROOM)
    v = kept(setup.operands.v, ROOM, setup.problem.dtype)
    yield from _values_scaled(setup.fed(v=v), setup.fed(v=scaled_by_power_of_two(v, n)), n)
    if descale := setup.operands.v_descale:
        yield from _values_scaled(setup.fed(v=v), setup.fed(v=v, v_descale=rescaled(descale, n)), n)


def _values_scaled(plain: Setup, scaled: Setup, n: int) -> Found:
    """Compare out with that of the plain call times 2^n, where both are normal numbers; all other bits must agree."""
    a = plain.run()
    b = scaled.run()
    fmt = FORMATS[plain.config.out_dtype]
    low = max(fmt.min_normal, 2.0**-40) * 2.0**ROOM
    high = fmt.max_finite / 2.0**ROOM
    with np.errstate(invalid="ignore"):
        size = np.abs(a["out"].astype(np.float64))
        inside = (size == 0) | ((size >= low) & (size <= high))
        expected = np.where(inside, a["out"], np.zeros(1, a["out"].dtype))
        expected = scaled_by_power_of_two(expected, n)
    what = f"V times 2^{n} against out times 2^{n}"
    yield same_values(f"{what}: out", "out", b["out"], expected, inside & (size > 0))
    yield same_bits(what, {**b, "out": a["out"]}, a)


def _partner(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    partners = ("softmax_scale", "k_descale") if kernel.dtype == "e4m3" else ("softmax_scale",)
    return {"partner": draw(st.sampled_from(partners)), "exponent": draw(_EXPONENTS)}


def _score_scaling(setup: Setup, trial: Trial) -> Found:
    """Multiply Q, or its descale, by 2^n and its partner by 2^-n; no bit may change."""
    n = trial.integer("exponent", -ROOM, ROOM)
    partner = trial.choice("partner", ("softmax_scale", "k_descale"))
    problem = setup.problem
    operands = setup.operands
    halved = replace(problem, softmax_scale=problem.softmax_scale * 2.0**-n)
    plain = setup
    if operands.q_descale is None or operands.k_descale is None:
        q, k = (kept(x, ROOM, problem.dtype) for x in (operands.q, operands.k))
        plain = setup.fed(q=q, k=k)
        moved = setup.fed(q=scaled_by_power_of_two(q, n), k=k)._replace(problem=halved)
    elif partner == "softmax_scale":
        moved = setup.fed(q_descale=rescaled(operands.q_descale, n))._replace(problem=halved)
    else:
        moved = setup.fed(q_descale=rescaled(operands.q_descale, n), k_descale=rescaled(operands.k_descale, -n))
    yield same_bits(f"Q times 2^{n} and {partner} times 2^{-n} against the plain call", moved.run(), plain.run())


def _block(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    if case.scheme is None:
        raise ValueError("blocks of descales go with a quantisation scheme")
    blocks = {
        "q": -(-case.problem.seqlen_q // case.scheme.block_rows_q),
        "k": -(-case.problem.seqlen_k // case.scheme.block_rows_k),
        "v": -(-case.problem.seqlen_k // case.scheme.block_rows_v),
    }
    name = draw(st.sampled_from([name for name, count in blocks.items() if count > 1] or ["q"]))
    return {"operand": name, "block": draw(st.integers(0, blocks[name] - 1)), "exponent": draw(_EXPONENTS)}


def _block_descale(setup: Setup, trial: Trial) -> Found:
    """Store one block of an operand 2^n larger and its descale 2^n smaller; no bit may change."""
    n = trial.integer("exponent", -ROOM, ROOM)
    name = trial.choice("operand", ("q", "k", "v"))
    problem = setup.problem
    descale: Descale | None = getattr(setup.operands, f"{name}_descale")
    if descale is None:
        raise ValueError(f"{trial.law} needs a quantisation scheme")
    block = trial.integer("block", 0, descale.values.shape[2] - 1)
    rows = descale.block_rows or max(problem.seqlen_q, problem.seqlen_k)
    x = kept(getattr(setup.operands, name), ROOM, problem.dtype)
    moved = x.copy()
    values = descale.values.copy()
    values[:, :, block] *= np.float32(2.0**-n)
    for seq in problem.sequences():
        view = (problem.rows_q if name == "q" else problem.rows_k)(moved, seq)[block * rows : (block + 1) * rows]
        view[:] = scaled_by_power_of_two(view, n)
    shifted = setup.fed(**{name: moved, f"{name}_descale": Descale(values, descale.block_rows)})
    what = f"block {block} of {name} stored times 2^{n} with its descale times 2^{-n}"
    yield same_bits(what, shifted.run(), setup.fed(**{name: x}).run())


def _signs(setup: Setup, trial: Trial) -> Found:
    plain = setup.run()
    operands = setup.operands
    yield same_bits("negated Q and K", setup.fed(q=-operands.q, k=-operands.k).run(), plain)
    negated = setup.fed(v=-operands.v).run()
    nonzero = plain["out"].astype(np.float64) != 0
    yield same_values("negated V: out", "out", negated["out"], -plain["out"], nonzero)
    yield same_bits("negated V", {**negated, "out": plain["out"]}, plain)


def _value_channels(setup: Setup, trial: Trial) -> Found:
    roll = trial.integer("roll", 1, 255)
    plain = setup.run()
    rolled = setup.fed(v=np.roll(setup.operands.v, roll, axis=-1)).run()
    yield same_bits(f"channels of V rolled by {roll}", rolled, {**plain, "out": np.roll(plain["out"], roll, axis=-1)})


def _repeat(setup: Setup, trial: Trial) -> Found:
    yield same_bits("second run", setup.run(), setup.run())


EXACT_LAWS = (
    law(
        "value_scaling_by_powers_of_two",
        "V, stored or by its descale, times 2^n gives out times 2^n and the same lse, bit for bit, for normal values",
        "invariant",
        _value_scaling,
        wanted=Wanted(),
        parameters=drawn(exponent=_EXPONENTS),
    ),
    law(
        "score_scaling_by_powers_of_two",
        "Q (its descale for e4m3) times 2^n and softmax_scale or k_descale times 2^-n changes no bit, for normal "
        "values",
        "invariant",
        _score_scaling,
        wanted=Wanted(),
        parameters=_partner,
    ),
    law(
        "block_descale_moves_into_stored_values",
        "e4m3: a block stored 2^n larger with its descale 2^n smaller changes no bit, for Q, K and V, in the normal "
        "range",
        "invariant",
        _block_descale,
        wanted=Wanted(descales="blocks", empty=False, single=True),
        parameters=_block,
        applies=needs("block_descale", dtypes=("e4m3",)),
    ),
    law(
        "sign_symmetry",
        "negating Q and K together changes no bit; negating V negates out and keeps lse, bit for bit",
        "invariant",
        _signs,
        wanted=Wanted(),
    ),
    law(
        "value_channels_are_independent",
        "permuting the channels of V permutes those of out and keeps lse, bit for bit",
        "invariant",
        _value_channels,
        wanted=Wanted(),
        parameters=lambda draw, kernel, case: {"roll": draw(st.integers(1, case.problem.head_dim_v - 1))},
    ),
    law(
        "repeated_run_is_identical",
        "the same call twice gives the same bits",
        "invariant",
        _repeat,
        wanted=Wanted(absorbed=True, seqlens_k=(17, 129, 257, 300, 513)),  # races need several tiles
        of=tuple(operations.OPERATIONS),
    ),
)
