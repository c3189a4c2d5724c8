"""Whole Triton attention kernels of an H200, run by the forward twin in their own order: every bit of O and LSE."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.traits import FAMILIES
from fa3_kernels.twin.forward import Forward, forward
from fa3_kernels.twin.softmax import LN2
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from tests.kernels import device_inputs as device

ORDER = FAMILIES["triton_tutorial"].order
# The e4m3 kernel takes alpha from the difference of maxima; its LSE, which keeps the offset of P, is not compared.
ORDER_E4M3 = replace(ORDER, rescale="of_difference")
CONFIGS = {
    "fp16": Config("fp16", 64, 64, 64, family="triton_tutorial"),
    "bf16": Config("bf16", 64, 64, 64, family="triton_tutorial"),
    "e4m3": Config("e4m3", 64, 64, 64, family="flash3"),
}
MISTAKES = [("keys", "right_to_left"), ("rescale", "of_difference"), ("row_sum", "block_serial"), ("lse", "log2")]


def run(dtype: Dtype, distribution: str, order=ORDER) -> tuple[Forward, np.ndarray, np.ndarray]:
    """The twin's binary32 output and lse, and the device's: two heads of 512 x 512 and head_dim 64."""
    arrays = device.attention_operands(dtype, distribution == "outlier")
    key = f"fa_{device.DEVICE_NAMES[dtype]}_64_{distribution}"
    assert device.digest(arrays) == device.stored_digest(key), "inputs are not the device's"
    problem = AttentionProblem(1, 2, 2, 512, 512, 64, dtype=dtype)
    x = Operands(*(a.view(FORMATS[dtype].dtype).transpose(1, 0, 2)[None] for a in arrays))
    got = forward(problem, x, CONFIGS[dtype], ideal=frozenset({"output"}), order=order)
    with np.load(device.GOLDEN / "fa_triton_outputs_d64.npz") as stored:
        return got, stored[f"{key}_O"].transpose(1, 0, 2)[None], stored[f"{key}_L"][None] * LN2


def differing(got: np.ndarray, want: np.ndarray) -> int:
    return int((np.ascontiguousarray(got).view(np.uint32) != np.ascontiguousarray(want).view(np.uint32)).sum())


@pytest.mark.parametrize("distribution", ["normal", "outlier"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_the_twin_reproduces_a_whole_triton_kernel(dtype: Dtype, distribution: str) -> None:
    got, out, lse = run(dtype, distribution, ORDER_E4M3 if dtype == "e4m3" else ORDER)
    assert differing(got.out, out) == 0
    assert dtype == "e4m3" or differing(got.lse, lse) == 0


@pytest.mark.parametrize(("switch", "value"), MISTAKES)
def test_a_planted_mistake_of_its_order_shows(switch: str, value: str) -> None:
    got, out, lse = run("fp16", "normal", replace(ORDER, **{switch: value}))
    assert differing(got.out, out) + differing(got.lse, lse) > 0
