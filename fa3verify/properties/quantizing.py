"""Laws of quantisation.

Of operands: rotating, centring and rounding to e4m3 stay within their bound of the unrotated truth. Of quantisers:
codes near their exact values, exact scalings, and sequences that do not touch each other.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fa3_reference.attention import attention
from fa3_reference.bounds.device import U_FP32
from fa3_reference.bounds.quantisation import quantization_bound
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands, Sequence
from fa3_reference.quantize import condition, quantize_qkv
from fa3_reference.scales import SHARING, can_rotate
from fa3verify.judging.metrics import other_bits
from fa3verify.operations import Outputs
from fa3verify.operations.quantize import NAMES
from fa3verify.properties.compare import Found, close, near_truth, same_bits, same_values, summed, within
from fa3verify.properties.law import Setup, Trial, Violation, set_up
from fa3verify.properties.transforms import part, scaled_by_power_of_two
from fa3verify.properties.trials import Wanted, drawn, law, needs

_OF = ("quantize",)
_UNIT = 2.0**-53
_MOST = 2**20  # largest drawn place, which is taken modulo the size
# Magnitudes that a scaling by 2^3 leaves normal in fp16.
LEAST = 2.0**-8
MOST = 2.0**8


def _exact(setup: Setup, trial: Trial) -> Found:
    setup = setup.configured(scale="power_of_two", rotate=False, subtract_k_mean=False)
    problem = setup.problem
    want = quantize_qkv(problem, *setup.operands.dequantized(problem), scheme=setup.config.scheme()).operands
    expected = {name: getattr(want, name) for name in NAMES}
    expected |= {f"{name}_descale": getattr(want, f"{name}_descale").values for name in NAMES}
    yield same_bits("scaled by powers of two, against correct rounding", setup.run(), expected)


def _scaled(setup: Setup, trial: Trial) -> Found:
    n = trial.integer("exponent", -3, 3)
    kept = {}
    for name in NAMES:
        x = getattr(setup.operands, name)
        size = np.abs(x.astype(np.float64))
        kept[name] = np.where((size >= LEAST) & (size <= MOST), x, 0).astype(x.dtype)
    a = setup.fed(**kept).run()
    b = setup.fed(**{name: scaled_by_power_of_two(x, n) for name, x in kept.items()}).run()
    expected = {name: a[name] for name in NAMES}
    for name in NAMES:
        descale = a[f"{name}_descale"]
        expected[f"{name}_descale"] = np.where(_is_filled(a, name, setup), descale * np.float32(2.0**n), descale)
    yield same_bits(f"q, k and v times 2^{n}", b, expected)


def _is_filled(got: Outputs, name: str, setup: Setup) -> np.ndarray:
    """Return which blocks have a code other than 0, in the shape of the descales; the descale of all others is 1.

    Heads that share a descale count as one block.
    """
    problem = setup.problem
    descale = got[f"{name}_descale"]
    rows_of = problem.rows_q if name == "q" else problem.rows_k
    rows = setup.config.descale_rows[NAMES.index(name)]
    filled = np.zeros(descale.shape, bool)
    for seq in problem.sequences():
        used = (rows_of(got[name], seq).astype(np.float64) != 0).any(axis=-1)  # (seqlen, heads)
        for block in range(descale.shape[2]):
            part = slice(block * rows, (block + 1) * rows) if rows else slice(None)
            filled[seq.index, :, block] = used[part].any(axis=0)
    shared = SHARING[setup.config.scope].heads_per_descale(name, problem.nheads, problem.nheads_kv)
    groups = filled.reshape(problem.batch, -1, shared, descale.shape[2])
    return np.repeat(groups.any(axis=2), shared, axis=1)


def _alone(setup: Setup, trial: Trial) -> Found:
    """Quantise every sequence in a call of its own, and compare all its outputs with those of the whole call."""
    whole = setup.run()
    for seq in _whole(setup.problem):
        alone = part(setup, seq).run()
        expected = {name: rows[None] for name, rows in _rows(setup, seq, *(whole[name] for name in NAMES)).items()}
        for name in (*(f"{name}_descale" for name in NAMES), "k_mean"):
            if name in whole:
                expected[name] = whole[name][seq.index : seq.index + 1, :, : alone[name].shape[2]]
        if "lse_correction" in whole:
            expected["lse_correction"] = setup.problem.rows_lse(whole["lse_correction"], seq)[None]
        yield same_bits(f"sequence {seq.index} alone against the whole call", alone, expected)


def _whole(problem: AttentionProblem) -> list[Sequence]:
    """Return the sequences that have both queries and keys."""
    return [seq for seq in problem.sequences() if seq.seqlen_q and seq.seqlen_k]


def _rows(setup: Setup, seq: Sequence, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
    problem = setup.problem
    return {"q": problem.rows_q(q, seq), "k": problem.rows_k(k, seq), "v": problem.rows_k(v, seq)}


def _scores(setup: Setup, trial: Trial) -> Found:
    """Compare scores of the codes, with the LSE correction, with those of the inputs.

    The check need not know which rotation or mean the kernel applied, as neither changes the scores.
    """
    problem = setup.problem
    got = setup.run()
    inputs = setup.operands.dequantized(problem)
    yield _usable("descales", got)
    stored = _stored(setup, got)
    codes = stored.dequantized(problem)
    shift = got.get("lse_correction", np.zeros(problem.lse_shape))
    shift_bound = setup.bound(got).get("lse_correction")
    for seq in _whole(problem):
        plain, coded = (_rows(setup, seq, *arrays) for arrays in (inputs, codes))
        keys, coded_keys = (np.repeat(rows["k"], problem.group, axis=1) for rows in (plain, coded))
        centred = keys - (keys.mean(axis=0) if setup.config.subtract_k_mean else 0)
        pairs = ((coded["q"], coded_keys), (plain["q"], keys))
        seen, exact = (problem.softmax_scale * np.einsum("qhd,khd->hqk", a, b) for a, b in pairs)
        seen += problem.rows_lse(shift, seq)[..., None]
        lost_q = _lost(plain["q"], stored.q_descale, seq, 1)
        lost_k = _lost(centred, stored.k_descale, seq, problem.group)
        norm_q, norm_k = (np.linalg.norm(x, axis=-1).T for x in (plain["q"], centred))
        limit = lost_q[:, :, None] * (norm_k + lost_k)[:, None] + norm_q[:, :, None] * lost_k[:, None]
        limit = problem.softmax_scale * limit + 2.0**-40 * np.abs(exact)
        if shift_bound is not None:
            limit += problem.rows_lse(shift_bound, seq)[..., None]
        limit = np.where(np.isnan(limit), np.inf, limit)
        yield close(f"scores of sequence {seq.index}", "scores", seen, exact, limit)


def _usable(what: str, got: Outputs) -> Violation | None:
    """Compare descales with 1 where they are not positive or not finite, so that no code can be decoded."""
    descales = {f"{name}_descale": got[f"{name}_descale"] for name in NAMES}
    due = {name: np.where((x > 0) & np.isfinite(x), x, np.ones_like(x)) for name, x in descales.items()}
    return same_bits(what, descales, due)


def _stored(setup: Setup, got: Outputs) -> Operands:
    """Return the codes and descales of a quantiser as operands of a kernel."""
    rows = setup.config.descale_rows
    q, k, v = (Descale(got[f"{name}_descale"], n) for name, n in zip(NAMES, rows, strict=True))
    return Operands(got["q"], got["k"], got["v"], q, k, v)


def _lost(x: np.ndarray, descale: Descale | None, seq: Sequence, group: int) -> np.ndarray:
    """Return by how much rounding may move each row in the 2-norm, (heads, rows), after any rotation.

    It is half a unit of e4m3 in each channel, relative or of the smallest number, plus the errors of rotation, centring
    and scaling in binary32.
    """
    head_dim = x.shape[-1]
    norm = np.linalg.norm(x, axis=-1).T
    turned = (math.log2(head_dim) + 8) * math.sqrt(head_dim) * U_FP32
    fmt = FORMATS["e4m3"]
    assert descale is not None
    factors = [descale.rows(seq.index, head // group, x.shape[0]) for head in range(x.shape[1])]
    smallest = fmt.min_subnormal / 2 * math.sqrt(head_dim) * np.stack(factors)
    return fmt.unit_roundoff * norm * (1 + turned) + turned * norm + smallest


def _special(setup: Setup, trial: Trial) -> Found:
    """Plant NaN and an infinity in an operand, in turn, and compare with calls that have 0 or the largest number there.

    NaN stays NaN and is no maximum. An infinity is not finite when it is decoded, and all else is; it touches no more
    codes and descales than the largest number.
    """
    setup = setup.configured(rotate=False, subtract_k_mean=False)
    problem = setup.problem
    seq = _whole(problem)[0]
    for index, name in enumerate(NAMES):
        plain = getattr(setup.operands, name)
        place = np.zeros(plain.shape, bool)
        rows = (problem.rows_k if index else problem.rows_q)(place, seq)
        rows.flat[trial.integer("position", 0, _MOST) % rows.size] = True
        values = (0.0, FORMATS[setup.config.input_dtype].max_finite, math.nan, math.inf)
        zero, most, nan, inf = (setup.fed(**{name: np.where(place, plain.dtype.type(x), plain)}).run() for x in values)
        where = f"{name}{np.argwhere(place)[0].tolist()}"
        due = {**zero, name: np.where(place, zero[name].dtype.type(math.nan), zero[name])}
        yield same_bits(f"NaN in {where} against 0", nan, due)
        untouched = {name: ~other_bits(x, most[name]) for name, x in zero.items()}
        yield same_bits(f"Inf in {where} against the largest number", inf, most, untouched)
        yield _usable(f"Inf in {where}", inf)
        with np.errstate(over="ignore"):
            decoded = _stored(setup, inf).dequantized(problem)[index].astype(np.float32)
        is_finite = np.isfinite(decoded).astype(np.float32)
        yield same_values(f"Inf in {where}: is {name} finite, decoded", name, is_finite, (~place).astype(np.float32))


def _rounding(x: np.ndarray, steps: float) -> np.ndarray:
    """Bound the error of conditioning in float64: ``steps`` roundings of a row's 2-norm, in every channel."""
    return np.broadcast_to(steps * _UNIT * np.linalg.norm(x, axis=-1, keepdims=True), x.shape)


def _rotation(setup: Setup, trial: Trial) -> Found:
    """Compare attention of rotated Q and K with the plain truth, first in float64, then of the kernel on e4m3."""
    case = trial.case
    problem = case.problem
    scheme = case.scheme
    if scheme is None:
        raise ValueError(f"{trial.law} needs a quantisation scheme")
    if can_rotate(problem.head_dim):
        scheme = replace(scheme, hadamard_seed=trial.integer("hadamard_seed", 0, 2**16))
    q, k, v = case.recipe.draw(problem)
    truth = attention(problem, q, k, v)
    turned_q, turned_k, lse_shift = condition(problem, q, k, scheme)
    shift = 0.0 if lse_shift is None else lse_shift
    steps = 2 * (math.log2(problem.head_dim) + 4) + problem.seqlen_k
    dq = _rounding(turned_q, steps)
    dk = _rounding(turned_k, steps) + _rounding(k, steps)
    still = quantization_bound(problem, turned_q, turned_k, v, dq, dk, np.zeros_like(v))
    rotated = attention(problem, turned_q, turned_k, v)
    expected = {"out": truth.out, "lse": truth.lse - shift}
    noise = {"out": np.zeros(()), "lse": 2.0**-48 * (1 + np.abs(shift) * np.ones(problem.lse_shape))}
    what = "float64 attention of rotated Q and K"
    yield within(what, rotated._asdict(), expected, summed(still._asdict(), noise))
    quantised = set_up(setup.kernel, replace(case, scheme=scheme))
    q8, k8, v8 = quantised.operands.dequantized(problem)
    moved = quantization_bound(
        problem, turned_q, turned_k, v, np.abs(q8 - turned_q) + dq, np.abs(k8 - turned_k) + dk, np.abs(v8 - v)
    )
    limit = summed(moved._asdict(), quantised.bound(), noise)
    yield within("rotated and quantised against the unrotated truth", quantised.run(), expected, limit)


QUANTIZE_LAWS = (
    law(
        "rotation_and_centring_keep_attention",
        "e4m3: rotating Q and K and centring K keeps float64 attention; the kernel stays within quantisation plus "
        "rounding bound of the plain truth",
        "bounded",
        _rotation,
        wanted=Wanted(longest_q=16),
        parameters=drawn(hadamard_seed=st.integers(0, 2**16)),
        applies=needs(dtypes=("e4m3",)),
    ),
    law(
        "stored_values_within_bound",
        "a code differs from the correctly rounded one only where the exact scaled value lies within binary32's "
        "error of a rounding boundary; descales, K mean and LSE correction lie within theirs",
        "bounded",
        near_truth,
        wanted=Wanted(),
        of=_OF,
    ),
    law(
        "powers_of_two_scale_exactly",
        "with power-of-two descales, no rotation and no K mean, every code and descale is the correctly rounded "
        "one, bit for bit",
        "exact",
        _exact,
        wanted=Wanted(),
        of=_OF,
    ),
    law(
        "descales_take_a_common_factor",
        "q, k and v times 2^n keep every code and give descales times 2^n, bit for bit, for values from 2^-8 to 2^8",
        "exact",
        _scaled,
        wanted=Wanted(),
        parameters=drawn(exponent=st.sampled_from((1, -1, 3, -3))),
        of=_OF,
    ),
    law(
        "codes_keep_the_scores",
        "scores of the codes times their descales, with the LSE correction, are those of the inputs, within what half "
        "units of e4m3 move the rows of q and k: whatever turns them, the heads of a group share it with their kv head",
        "bounded",
        _scores,
        wanted=Wanted(empty=False),
        of=_OF,
    ),
    law(
        "special_values_are_stored",
        "without rotation and K mean NaN is stored as NaN and changes no other code and no descale; an infinity is not "
        "finite when decoded in binary32, leaves all else finite, and changes no bit that the largest number leaves",
        "exact",
        _special,
        wanted=Wanted(empty=False, families=("normal", "peaky", "offset_v"), max_edits=0),
        parameters=drawn(position=st.integers(0, _MOST)),
        of=_OF,
    ),
    law(
        "sequences_are_quantised_alone",
        "every output of a sequence is what quantising it alone gives, bit for bit",
        "exact",
        _alone,
        wanted=Wanted(several=True),
        of=_OF,
    ),
)
