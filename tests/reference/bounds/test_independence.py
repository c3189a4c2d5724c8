"""The judge shares nothing with the kernel: no module, and no error planted in the twin's machine moves the bound.

``python -m tests.reference.bounds.test_independence`` prints from which size on the bound alone fails each planted
error (reports/notes/bound-independence.md).
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin import arithmetic, convert, float32, mufu
from fa3_kernels.twin.forward import forward
from fa3_kernels.twin.wgmma import Operand, wgmma
from fa3_reference.attention import Attention, attention
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.formats import FORMATS, ulp
from fa3_reference.problem import DTYPES, AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme, prepare

ULPS = tuple(4**i for i in range(11))
BITS = tuple(range(1, 12))
Plant = Callable[[pytest.MonkeyPatch, int], None]


def test_the_bounds_run_without_any_module_of_the_kernels():
    program = """
import sys
import numpy as np
from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.device import TENSOR_CORE
from fa3_reference.bounds.tensor_core import multiply_between
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme, prepare
x = np.random.default_rng(0).standard_normal((3, 1, 32, 1, 64))
for dtype in ("fp16", "e4m3"):
    problem = AttentionProblem(1, 1, 1, 32, 32, 64, dtype=dtype)
    operands = prepare(problem, *x, QuantScheme("block") if dtype == "e4m3" else None).operands
    bound = forward_bound(problem, operands, KernelModel(dtype, "bf16", 128, 128))
    assert np.isfinite(bound.out).all()
    multiply_between(np.zeros((1, 32)), np.ones((1, 32)), np.ones((32, 1)), TENSOR_CORE[dtype])
print([name for name in sys.modules if name.startswith("fa3") and not name.startswith("fa3_reference")])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout == "[]\n", found.stderr


def with_core(patch: pytest.MonkeyPatch, **bits: int) -> None:
    """Give the twin's tensor core fewer bits."""

    def planted(a, b, c=None):
        fmt = replace(a.fmt, **{name: getattr(a.fmt, name) - fewer for name, fewer in bits.items()})
        return wgmma(replace(a, fmt=fmt), replace(b, fmt=fmt), c)

    patch.setattr(arithmetic, "wgmma", planted)


def lost_products(patch: pytest.MonkeyPatch, count: int) -> None:
    """Lose the first product of the last ``count`` instructions of every chain."""

    def planted(a: Operand, b, c=None):
        steps = range(0, a.bits.shape[1], a.fmt.k_step)
        lost = np.zeros(a.bits.shape[1], bool)
        lost[list(steps)[-count:]] = True
        kept = [np.where(lost, np.zeros_like(x), x) for x in (a.bits, a.value, a.power)]
        return wgmma(replace(a, bits=kept[0], value=kept[1], power=kept[2]), b, c)

    patch.setattr(arithmetic, "wgmma", planted)


def rounding_core(patch: pytest.MonkeyPatch, _: int) -> None:
    """Round products, C and sums to nearest instead of cutting them."""

    def planted(a, b, c=None):
        fmt = a.fmt
        d = np.zeros((len(a.value), b.value.shape[1])) if c is None else c.astype(float)
        for k in range(0, a.bits.shape[1], fmt.k_step):
            ks = slice(k, k + fmt.k_step)
            power = (a.power[:, ks, None].astype(float) * b.power[ks]).max(1)
            unit = (
                np.maximum(power, np.exp2(np.floor(np.log2(np.maximum(np.abs(d), 2.0**-126))))) * 2.0**-fmt.align_bits
            )
            addends = a.value[:, ks, None].astype(float) * b.value[ks]
            total = (np.rint(addends / unit[:, None]).sum(1) + np.rint(d / unit)) * unit
            step = np.exp2(np.floor(np.log2(np.maximum(np.abs(total), 2.0**-126))) - fmt.out_bits)
            d = np.rint(total / step) * step
        return d.astype(np.float32)

    patch.setattr(arithmetic, "wgmma", planted)


def moved(y: np.ndarray, x: np.ndarray, count: int) -> np.ndarray:
    """Results moved by ``count`` ulp, up or down as the parity of the input's bits says."""
    odd = np.asarray(x, np.float32).view(np.int32) & 1
    by = np.where(np.isfinite(y) & (y != 0), count * (2 * odd - 1), 0).astype(np.int32)
    return (y.view(np.int32) + by).view(np.float32)


def off_by_ulps(patch: pytest.MonkeyPatch, count: int, name: str) -> None:
    unit, scaled = getattr(mufu, name), float32.exp2_scaled

    def planted(x):
        return moved(unit(x), x, count)

    patch.setattr(mufu, name, planted)
    if name == "ex2":
        patch.setattr(float32, "exp2_scaled", lambda s, c, m: moved(scaled(s, c, m), s, count))


def truncated(patch: pytest.MonkeyPatch, method: str) -> None:
    def planted(self, x, fmt=None):
        return convert.encode_f32(x, fmt or self.dtype, rounding="toward_zero")

    patch.setattr(arithmetic.Arithmetic, method, planted)


def rounded_twice(patch: pytest.MonkeyPatch, extra_bits: int, method: str) -> None:
    """Round to ``extra_bits`` more bits than the format has, then to the format."""

    def planted(self, x, fmt=None):
        fmt = fmt or self.dtype
        unit = ulp(x, FORMATS[fmt]) * 2.0**-extra_bits
        return convert.encode_f32((np.rint(x / unit) * unit).astype(np.float32), fmt)

    patch.setattr(arithmetic.Arithmetic, method, planted)


@dataclass(frozen=True, slots=True)
class Planted:
    """An error of the twin's machine: what it is, in which unit its sizes are, the sizes from small to large."""

    what: str
    unit: str
    sizes: tuple[int, ...]
    plant: Plant


PLANTED = (
    Planted("first product of the last instructions of a chain lost", "instructions", (1, 2, 4), lost_products),
    Planted("tensor core aligns to fewer bits", "bits", BITS, lambda p, n: with_core(p, align_bits=n)),
    Planted("tensor core keeps fewer bits of a result", "bits", BITS, lambda p, n: with_core(p, out_bits=n)),
    Planted("tensor core rounds to nearest", "", (1,), rounding_core),
    *(
        Planted(f"{f} moved, either sign", "ulp", ULPS, functools.partial(off_by_ulps, name=f))
        for f in ("ex2", "rcp", "lg2")
    ),
    Planted("P truncated", "", (1,), lambda p, _: truncated(p, "encode_p")),
    Planted("output truncated", "", (1,), lambda p, _: truncated(p, "encode_output")),
    Planted("P rounded twice", "further bits at first", (8, 4, 2, 1), lambda p, n: rounded_twice(p, n, "encode_p")),
    Planted(
        "output rounded twice", "further bits at first", (8, 4, 2, 1), lambda p, n: rounded_twice(p, n, "encode_output")
    ),
)


FAMILIES = {"normal": (1.0, 0.0), "peaky": (3.0, 0.0), "V of mean 1": (1.0, 1.0)}  # gain of Q and K, mean of V


@functools.cache
def problem_of(dtype: Any, family: str) -> tuple[AttentionProblem, Operands, Attention, ErrorBound]:
    problem, (gain, mean) = AttentionProblem(1, 1, 1, 64, 384, 64, dtype=dtype), FAMILIES[family]
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    scheme = QuantScheme("block") if dtype == "e4m3" else None
    operands = prepare(problem, gain * q, gain * k, v + mean, scheme).operands
    return problem, operands, attention(problem, *operands.dequantized(problem)), bound_of(problem, operands)


def bound_of(problem: AttentionProblem, operands: Operands) -> ErrorBound:
    config = default_config(problem)
    return forward_bound(problem, operands, config.kernel_model())


def worst_ratios(dtype: str, plant: Callable[[pytest.MonkeyPatch], None]) -> tuple[float, float]:
    """Largest error / bound of O and of LSE over the families, with an error planted."""
    worst = np.zeros(2)
    for family in FAMILIES:
        problem, operands, truth, bound = problem_of(dtype, family)
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            got = forward(problem, operands)
        pairs = ((got.out.astype(float), truth.out, bound.out), (got.lse, truth.lse, bound.lse))
        ratios = [np.nan_to_num(np.abs(x - y) / z, nan=np.inf).max() for x, y, z in pairs]
        worst = np.maximum(worst, ratios)
    return float(worst[0]), float(worst[1])


def first_failure(planted: Planted, dtype: str) -> tuple[int | None, tuple[float, float]]:
    """The least size at which the bound fails the twin, None for no size; the ratios there or at the largest size."""
    ratios = 0.0, 0.0
    for size in planted.sizes:
        ratios = worst_ratios(dtype, lambda patch, size=size: planted.plant(patch, size))
        if max(ratios) > 1:
            return size, ratios
    return None, ratios


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.what)
def test_an_error_planted_in_the_twin_moves_the_twin_and_not_its_bound(planted: Planted, dtype: str, monkeypatch):
    problem, operands, _, bound = problem_of(dtype, "normal")
    before = forward(problem, operands)
    planted.plant(monkeypatch, planted.sizes[-1])
    after = forward(problem, operands)
    assert before.out.tobytes() != after.out.tobytes() or before.lse.tobytes() != after.lse.tobytes()
    for x, y in zip(bound, bound_of(problem, operands), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_passes_the_twin(dtype: str):
    assert max(worst_ratios(dtype, lambda _: None)) <= 1


@pytest.mark.parametrize("planted", [p for p in PLANTED if p.unit], ids=lambda planted: planted.what)
def test_the_bound_fails_a_gross_error_of_the_twins_machine(planted: Planted):
    ratios = [max(worst_ratios(dtype, lambda patch: planted.plant(patch, planted.sizes[-1]))) for dtype in DTYPES]
    assert max(ratios) > 1


def table() -> str:
    """The least size that the bound fails, per planted error and format, as Markdown."""
    lines = ["| planted error | unit | " + " | ".join(DTYPES) + " |", "|---|---|" + "---|" * len(DTYPES)]
    clean = [" and ".join(f"{x:.3g}" for x in worst_ratios(dtype, lambda _: None)) for dtype in DTYPES]
    lines.append("| none | | " + " | ".join(f"({x})" for x in clean) + " |")
    for planted in PLANTED:
        cells = []
        for dtype in DTYPES:
            size, (out, lse) = first_failure(planted, dtype)
            where = "none" if size is None else "fails" if not planted.unit else str(size)
            cells.append(f"{where} ({out:.3g} and {lse:.3g})")
        lines.append(f"| {planted.what} | {planted.unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
