"""Distributions: the table of named ways to draw Q, K and V, with their parameters, formulas and reasons.

If a distribution is ``prefix_stable``, row r of head h of sequence b does not depend on the batch, the number of kv
heads, the lengths or the mask: a problem with fewer rows, kv heads or sequences draws the leading part of the same data
(``head_dim`` and the group size must be equal). The functions that draw stand in :mod:`fa3verify.inputs.draws`; a
:class:`fa3verify.inputs.recipe.Recipe` names a distribution with its parameters and a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fa3verify.inputs import activations, captures, draws
from fa3verify.inputs.draws import Arrays, Value


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a distribution with its default.

    A number must lie in [low, high]. A text must be one of ``options()``, and may be any text where that is None.
    """

    name: str
    default: Value
    low: float = 0.0
    high: float = 0.0
    options: Callable[[], tuple[str, ...]] | None = None

    @property
    def is_integer(self) -> bool:
        return isinstance(self.default, int)

    def check(self, owner: str, value: object) -> Value:
        """Return the value in the parameter's type; ValueError if it is illegal."""
        if isinstance(self.default, str):
            legal = self.options() if self.options else None
            if not isinstance(value, str) or (legal is not None and value not in legal):
                rule = f"one of {', '.join(legal)}" if legal is not None else "a text"
                raise ValueError(f"{owner}: {self.name} must be {rule}, got {value!r}")
            return value
        kind = "an integer" if self.is_integer else "a number"
        rule = f"{owner}: {self.name} must be {kind} in [{self.low:g}, {self.high:g}], got {value!r}"
        is_number = isinstance(value, int if self.is_integer else int | float)
        if isinstance(value, bool) or not is_number or not self.low <= value <= self.high:
            raise ValueError(rule)
        return value if self.is_integer else float(value)


@dataclass(frozen=True, slots=True)
class Distribution:
    """One row of the table: how Q, K and V are drawn, the formula for reports, and why it is there.

    ``kind`` is its class of inputs in :mod:`fa3verify.cases.space`. ``check(problem, **parameters)`` raises ValueError
    for a problem that it cannot fill; None if it fills any.
    """

    name: str
    draw: Callable[..., Arrays] = field(repr=False)
    formula: str
    why: str
    parameters: tuple[Parameter, ...] = ()
    prefix_stable: bool = True
    kind: str = "even"
    check: Callable[..., None] | None = field(default=None, repr=False)

    def settings(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Return all parameters in declared order, defaults filled in; ValueError if unknown or illegal."""
        legal = [p.name for p in self.parameters]
        for name in given:
            if name not in legal:
                known = ", ".join(legal) or "none"
                raise ValueError(f"{self.name}: unknown parameter {name!r} (legal: {known})")
        return {p.name: p.check(self.name, given.get(p.name, p.default)) for p in self.parameters}


_CHANNEL_PARAMETERS = (
    Parameter("channels", 4, 1, 16),
    Parameter("ratio", 8.0, 1, 100),
    Parameter("mean_share", 0.64, 0, 1),
)
_TABLE = (
    Distribution("normal", draws.normal, "N(0, std^2)", "the usual smoke test", (Parameter("std", 1.0, 2**-100, 100),)),
    Distribution(
        "fa3_outliers",
        draws.fa3_outliers,
        "N(0, 1) + N(0, outlier_variance) Bernoulli(rate)",
        "the FlashAttention-3 paper's accuracy experiment",
        (Parameter("outlier_variance", 100.0, 0, 1e6), Parameter("rate", 0.001, 0, 0.1)),
        kind="outliers",
    ),
    Distribution(
        "outlier_channels",
        draws.outliers(draws.apart),
        "N(0, 1), but ratio (+-sqrt(mean_share) + sqrt(1 - mean_share) N(0, 1)) in some channels of Q and K",
        "large channels, chosen independently for Q and K",
        (
            Parameter("channels", 2, 1, 16),
            Parameter("ratio", 30.0, 1, 1000),
            Parameter("mean_share", 0.64, 0, 1),
        ),
        kind="outliers",
    ),
    Distribution(
        "block_scaled",
        draws.block_scaled,
        "N(0, 1) 2^e, e uniform in [-octaves, octaves] per tile of rows (integer e if power_of_two)",
        "a scale taken from the wrong block shows",
        (Parameter("tile", 64, 16, 256), Parameter("octaves", 2, 0, 6), Parameter("power_of_two", 1, 0, 1)),
        kind="uneven blocks",
    ),
    Distribution(
        "peaky",
        draws.peaky,
        "Q, K: gain N(0, 1); V: N(0, 1)",
        "large logits, few keys per row",
        (Parameter("gain", 3.0, 0.1, 32),),
        kind="large scores",
    ),
    Distribution(
        "aligned_outliers",
        draws.outliers(draws.aligned),
        "as outlier_channels, the same channels in Q and K",
        "as decoder models have them; rotation helps",
        _CHANNEL_PARAMETERS,
        kind="outliers",
    ),
    Distribution(
        "antialigned_outliers",
        draws.outliers(draws.disjoint),
        "as outlier_channels, disjoint channels in Q and K",
        "rotation hurts",
        _CHANNEL_PARAMETERS,
        kind="outliers",
    ),
    Distribution(
        "ramp",
        draws.ramp,
        "N(0, 1) 2^(b mod steps - floor(steps / 2)), b the row's tile",
        "neighbouring blocks always differ by a factor of two or more",
        (Parameter("tile", 64, 16, 256), Parameter("steps", 4, 1, 8)),
        kind="uneven blocks",
    ),
    Distribution(
        "needle",
        draws.needle,
        "Q_i = N(0, 1) + margin / (softmax_scale head_dim) K_t(i), t(i) uniform over the keys row i sees",
        "one key decides each row: a lost or misplaced key shows",
        (Parameter("margin", 20.0, 0, 100),),
        prefix_stable=False,
        kind="large scores",
    ),
    Distribution(
        "ties",
        draws.ties,
        "N(0, 1); K_j = K_(j mod distinct)",
        "equal scores inside and across tiles",
        (Parameter("distinct", 4, 1, 256),),
        kind="ties",
    ),
    Distribution(
        "constant_rows",
        draws.constant_rows,
        "every row std N(0, 1) times (1, ..., 1)",
        "a Hadamard rotation turns each row into one spike",
        (Parameter("std", 1.0, 0.001, 100),),
    ),
    Distribution(
        "huge",
        draws.huge("q", "k"),
        "Q, V: +-U[1/2, 1) fraction L, L the largest magnitude whose fp32 scores and sums stay finite; "
        "K so small that scores are near N(0, 2)",
        "overflow of anything but the scores; subnormal K",
        (Parameter("fraction", 1.0, 2**-6, 1),),
        kind="extremes",
    ),
    Distribution(
        "huge_keys",
        draws.huge("k", "q"),
        "as huge, with Q and K exchanged",
        "subnormal Q beside keys that make its scores count",
        (Parameter("fraction", 1.0, 2**-6, 1),),
        kind="extremes",
    ),
    Distribution(
        "tiny",
        draws.tiny,
        "+-U[1, 2) 2^e m, m the format's least normal number, e uniform in 0..octaves",
        "the bottom of the normal range; uniform softmax",
        (Parameter("octaves", 0, 0, 8),),
        kind="extremes",
    ),
    Distribution(
        "subnormals",
        draws.subnormals,
        "+-U[0, 1) fraction m, m the least normal number; e4m3: one channel of 448 pins the scale at 1",
        "flushed subnormals show in V",
        (Parameter("fraction", 1.0, 2**-4, 1),),
        kind="extremes",
    ),
    Distribution(
        "offset_v",
        draws.offset_v,
        "Q, K: N(0, 1); V: N(mean, std^2)",
        "accumulator loss",
        (Parameter("mean", 1.0, -100, 100), Parameter("std", 1.0, 0, 10)),
    ),
    Distribution(
        "sink",
        draws.sink,
        "N(0, 1); Q += u, K_0 = strength / (softmax_scale head_dim) u, u in {-1, 1}^d; V_0 *= v_factor",
        "the attention sink of decoder models",
        (Parameter("strength", 7.0, 0, 50), Parameter("v_factor", 0.05, 0, 1)),
        kind="large scores",
    ),
    Distribution(
        "cancelling_v",
        draws.cancelling_v,
        "K_2j = K_2j+1; V_j = (-1)^j magnitude U[1/2, 1)_floor(j/2) + residue N(0, 1)",
        "sums near zero of large terms",
        (Parameter("magnitude", 1024.0, 1, 30000), Parameter("residue", 1.0, 0, 10)),
        kind="cancelling",
    ),
    Distribution(
        "positive",
        draws.positive,
        "U[low, low + width)",
        "every rounding error has one sign: accumulator loss",
        (Parameter("low", 0.0, 0, 100), Parameter("width", 1.0, 0, 100)),
    ),
    Distribution(
        "level",
        draws.level,
        "N(0, 1); Q_0 = sign(nats) c, K_0 = c, c = sqrt(|nats| / softmax_scale)",
        "scores and lse far from zero: exp of an lse overflows, scores pass for sentinels",
        (Parameter("nats", -120.0, -4e6, 4e6),),
        kind="far scores",
    ),
    Distribution(
        "shelf",
        draws.shelf,
        "Q = (c, 0, ...), K_0 = 0, K_j = (-c, 0, ...), c = sqrt(depth_log2 ln 2 / softmax_scale); V: N(0, 1)",
        "every key but one weighs 2^-depth_log2: lost in a sum that adds them singly, or subnormal in P",
        (Parameter("depth_log2", 24.0, 0, 200),),
        kind="far scores",
    ),
    Distribution(
        "vanishing",
        draws.vanishing,
        "Q, K: N(0, 1), but Q_0 = c = sqrt(|nats| / softmax_scale), and K_0 = c in the tiles of the half that weighs, "
        "the later one if nats > 0, else 0; V: N(0, 1) / 1024 there, else +-magnitude U[1/2, 1)",
        "a large output that loses all weight to other keys: what stays of it in a merge that subtracts",
        (Parameter("nats", 100.0, -1000, 1000), Parameter("magnitude", 30000.0, 1, 30000)),
        kind="cancelling",
    ),
    Distribution(
        "activations",
        draws.first_tokens(activations.stored),
        "Q, K, V of a real pretrained head, the first `tokens` tokens (0: all); the seed is ignored",
        "what kernels meet in practice",
        (
            Parameter(
                "name",
                "smollm2_dev-prose2_n129_L08_kv2",
                options=lambda: tuple(case.name for case in activations.list_activations()),
            ),
            Parameter("tokens", 0, 0, 512),
        ),
        prefix_stable=False,
        check=draws.fits(activations.stored),
    ),
    Distribution(
        "captured",
        draws.first_tokens(captures.pinned),
        "Q, K, V of a file of one's own, the first `tokens` tokens (0: all); the seed is ignored",
        "what a kernel will meet in one's own model",
        (Parameter("file", ""), Parameter("sha256", ""), Parameter("tokens", 0, 0, 2**31)),
        prefix_stable=False,
        check=draws.fits(captures.pinned),
    ),
)
DISTRIBUTIONS: dict[str, Distribution] = {row.name: row for row in _TABLE}
