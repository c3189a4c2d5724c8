"""Wrong kernels that show that a clause can fail: each is a sound twin with one mistake around it.

``fa3verify/data/clauses.toml`` names them as ``tests.quality.wrong_kernels:NAME``, beside twins with a planted fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import operations
from fa3verify.kernels import policy
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from tests.harness.properties import planted

Outputs = dict[str, Any]
Mistake = Callable[[AttentionProblem, Operands, Any, Outputs], Mapping[str, Any]]


def around(name: str, mistake: Mistake) -> Kernel:
    """Return a twin whose outputs, by name, go through a mistake."""
    sound = find(name)

    def run(problem: AttentionProblem, operands: Operands, config: Any) -> Outputs:
        named = operations.find(sound.operation).named(sound.code.run(problem, operands, config), problem, config)
        return named | mistake(problem, operands, config, named)

    return replace(sound.altered(run=run), name=mistake.__name__)


def rounded_down(x: np.ndarray) -> np.ndarray:
    """Return the next lower number of every element."""
    return np.nextafter(x, x.dtype.type(-np.inf))


def packed_lse_rounded() -> Kernel:
    """Keep the lse of packed calls in half of its bits."""

    def lse_of_packed_calls_in_16_bits(problem, operands, config, named):
        return {"lse": named["lse"].astype(np.float16).astype(np.float32)} if problem.is_varlen else {}

    return around("twin.fp16", lse_of_packed_calls_in_16_bits)


def schedule_in_the_bits() -> Kernel:
    """Round outputs the other way where softmax and GEMMs do not overlap."""

    def outputs_of_one_schedule(problem, operands, config, named):
        return {} if config.intra_wg_overlap else {"out": rounded_down(named["out"])}

    return around("twin.fp16", outputs_of_one_schedule)


def lower_outputs() -> Kernel:
    """Round every output down."""

    def outputs_rounded_down(problem, operands, config, named):
        return {"out": rounded_down(named["out"])}

    return around("twin.fp16", outputs_rounded_down)


def mixed_channels() -> Kernel:
    """Add a little of the first channel to all others."""

    def channels_mixed(problem, operands, config, named):
        out = named["out"].astype(np.float32)
        return {"out": (out + out[..., :1] / 1024).astype(named["out"].dtype)}

    return around("twin.fp16", channels_mixed)


def every_other_call() -> Kernel:
    """Move every second call by its last bit."""
    calls = []

    def every_second_call_moved(problem, operands, config, named):
        calls.append(problem)
        return {"out": rounded_down(named["out"])} if len(calls) % 2 else {}

    return around("twin.fp16", every_second_call_moved)


def hidden_nan() -> Kernel:
    """Return 0 for what is not finite."""

    def nan_hidden(problem, operands, config, named):
        return {"out": np.where(np.isfinite(named["out"]), named["out"], named["out"].dtype.type(0))}

    return around("twin.fp16", nan_hidden)


def coarse_descales() -> Kernel:
    """Keep descales of Q and V as multiples of 2^-10."""

    def descales_on_a_grid(problem, operands, config, named):
        names = ("q_descale", "v_descale")
        return {name: np.float32(np.rint(named[name] * 1024) / 1024) for name in names}

    return around("twin.quantize", descales_on_a_grid)


def lower_gradients() -> Kernel:
    """Round dQ down."""

    def gradients_rounded_down(problem, operands, config, named):
        return {"dq": rounded_down(named["dq"])}

    return around("twin.backward.fp16", gradients_rounded_down)


def squared_dout() -> Kernel:
    """Let dV grow faster than dO."""

    def dv_grows_with_dv(problem, operands, config, named):
        dv = named["dv"].astype(np.float64)
        return {"dv": (dv + dv * np.abs(dv) / 16).astype(named["dv"].dtype)}

    return around("twin.backward.fp16", dv_grows_with_dv)


def dv_from_v() -> Kernel:
    """Begin dV of the first key with what V holds there."""

    def dv_begins_with_v(problem, operands, config, named):
        dv = named["dv"].copy()
        dv[..., 0, 0, :] += operands.v[..., 0, 0, :] / 64
        return {"dv": dv}

    return around("twin.backward.fp16", dv_begins_with_v)


def dlse_dropped() -> Kernel:
    """Take a gradient of the lse for 0."""
    sound = find("twin.backward.fp16")

    def run(problem, operands, config):
        return sound.code.run(problem, replace(operands, dlse=None), config)

    return replace(sound.altered(run=run), name="dlse_dropped")


def windows_from_the_top() -> Kernel:
    """Align windows top-left."""
    return planted.planted(planted.window_counted_from_the_top, bitwise=frozenset())


def prefill_from_the_top() -> Kernel:
    """Align the causal mask of several queries top-left."""
    return planted.planted(planted.prefill_aligned_to_the_top_left, bitwise=frozenset())


def masked_lse_in_base_2() -> Kernel:
    """Return the lse of masked calls in base 2."""
    return planted.planted(planted.lse_of_masked_calls_in_base_2, bitwise=frozenset())


def lone_key_dropped() -> Kernel:
    """Lose a key that is alone in its tile."""
    return planted.planted(planted.key_alone_in_a_tile_dropped, bitwise=frozenset())


def third_sequence_lost() -> Kernel:
    """Read the second sequence for the third."""
    return planted.planted(planted.third_sequence_reads_the_second)


def outputs_on_a_grid() -> Kernel:
    """Round outputs to multiples of 1/16."""
    return planted.planted(planted.output_on_a_fixed_grid)


def small_descales_lost() -> Kernel:
    """Take descales of K below 1 for 1."""
    return planted.planted(planted.small_k_descales_taken_for_one, "e4m3")


def other_bits() -> Kernel:
    """Claim the bits of a twin and truncate outputs."""
    return replace(find("twin.fp16+truncated_output"), name="other_bits", twin=find("twin.fp16"))


def one_nan() -> Kernel:
    """Return NaN in the first element."""

    def first_element_nan(problem, operands, config, named):
        out = named["out"].copy()
        out[(0,) * out.ndim] = np.nan
        return {"out": out}

    return around("twin.fp16", first_element_nan)


def k_descales_of_neighbours() -> Kernel:
    """Return the descales of K in another order."""

    def k_descales_turned(problem, operands, config, named):
        return {"k_descale": np.roll(named["k_descale"], 1, axis=1)}

    return around("twin.quantize", k_descales_turned)


def coarse_mean() -> Kernel:
    """Return the mean of K in 16 bits."""

    def mean_in_16_bits(problem, operands, config, named):
        return {"k_mean": named["k_mean"].astype(np.float16).astype(np.float32)} if "k_mean" in named else {}

    return around("twin.quantize", mean_in_16_bits)


def minus_inf_as_nan() -> Kernel:
    """Return NaN where an element of K is -inf."""

    def minus_inf_taken_for_nan(problem, operands, config, named):
        return {"out": named["out"] * named["out"].dtype.type(np.nan)} if np.isneginf(operands.k).any() else {}

    return around("twin.fp16", minus_inf_taken_for_nan)


def filled_empty_rows() -> Kernel:
    """Return ones in rows without a key."""

    def ones_without_keys(problem, operands, config, named):
        empty = policy.out_rows(problem, policy.empty_rows(problem))
        return {"out": np.where(empty, named["out"].dtype.type(1), named["out"])}

    return around("twin.fp16", ones_without_keys)


def infinite_empty_lse() -> Kernel:
    """Return an lse of +inf in rows without a key."""

    def lse_without_keys_inf(problem, operands, config, named):
        return {"lse": np.where(policy.empty_rows(problem), np.float32(np.inf), named["lse"])}

    return around("twin.fp16", lse_without_keys_inf)
