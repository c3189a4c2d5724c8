"""wgmma against two independent models: MMA-Sim (mmasim) and mmaemu, where the extra 'oracles' is installed.

Inputs have no zero operands and no result near underflow: there the models differ from the device in the
exponent of a zero factor and in the sign of a vanished sum, and the device data decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fa3_kernels.twin.wgmma import TENSOR_FORMATS, operand, operand_b, wgmma
from tests.kernels import device_inputs as device
from tests.kernels.twin.test_wgmma import assert_same_bits

pytestmark = pytest.mark.optional
M, N = 64, 64


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def mmasim() -> Any:
    return pytest.importorskip("mmasim.nv_ptx", reason="needs mmasim: install the extra 'oracles'")


@pytest.fixture(scope="module")
def mmaemu() -> Any:
    return pytest.importorskip("mmaemu.model.chain", reason="needs mmaemu: install the extra 'oracles'")


def case(fmt: str, family: str, k: int, seed: int) -> device.Triple:
    """A tile of normal numbers of any size without zeros; every product and sum is far from underflow."""
    a, b, c = (x[0] for x in device.tiles(fmt, family, 2, M, N, k, seed))
    smallest = TENSOR_FORMATS[fmt].bits_dtype.type(1 << TENSOR_FORMATS[fmt].fraction_bits)  # a normal number
    mask = TENSOR_FORMATS[fmt].magnitude_mask
    a, b = (np.where(x & mask < smallest, smallest, x) for x in (a, b))
    return a, b, c


def tensor(torch: Any, bits: np.ndarray, fmt: str) -> Any:
    dtype = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[fmt]
    signed = torch.int16 if bits.dtype == np.uint16 else torch.uint8
    return torch.from_numpy(np.ascontiguousarray(bits).view("i2" if signed == torch.int16 else "u1")).view(
        getattr(torch, dtype)
    )


def ours(a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt: str) -> np.ndarray:
    return wgmma(operand(a, fmt), operand_b(b, fmt), c.view(np.float32))


def by_mmasim(torch: Any, mmasim: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt: str) -> np.ndarray:
    """Chain of mmasim's wgmma over all of k."""
    step = TENSOR_FORMATS[fmt].k_step
    name = {"fp16": "f16"}.get(fmt, fmt)
    instruction = mmasim.WGMMA("Hopper", f"m64n{len(b)}k{step}.f32.{name}.{name}")
    d = torch.from_numpy(c.view(np.float32).copy())
    for k in range(0, a.shape[1], step):
        d = instruction(tensor(torch, a[:, k : k + step], fmt), tensor(torch, b[:, k : k + step].T, fmt), d)
    return d.numpy()


def by_mmaemu(torch: Any, mmaemu: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt: str) -> np.ndarray:
    """The same by mmaemu, for FP8."""
    left = tensor(torch, a, fmt)[:, None].expand(len(a), len(b), a.shape[1])
    right = tensor(torch, b, fmt)[None].expand(len(a), len(b), a.shape[1])
    return mmaemu.dot(left, right, torch.from_numpy(c.view(np.float32).copy()), preset="hopper").numpy()


recipes = given(st.sampled_from(["normal", "outlier", "cancel", "range"]), st.integers(0, 1 << 30))
few = settings(max_examples=25)  # mmasim takes 0.1 s a tile


@pytest.mark.parametrize("fmt", list(TENSOR_FORMATS))
@few
@recipes
def test_wgmma_equals_mmasim(torch: Any, mmasim: Any, fmt: str, family: str, seed: int) -> None:
    triple = case(fmt, family, 2 * TENSOR_FORMATS[fmt].k_step, seed)
    assert_same_bits(ours(*triple, fmt), by_mmasim(torch, mmasim, *triple, fmt), (fmt, family, seed))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@few
@recipes
def test_fp8_wgmma_equals_mmaemu(torch: Any, mmaemu: Any, fmt: str, family: str, seed: int) -> None:
    triple = case(fmt, family, 64, seed)
    assert_same_bits(ours(*triple, fmt), by_mmaemu(torch, mmaemu, *triple, fmt), (fmt, family, seed))
