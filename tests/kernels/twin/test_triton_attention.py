"""Whole Triton attention kernels of an H200, run by the forward twin in their own order: every bit of O and LSE."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import FAMILIES
from fa3_kernels.twin.forward import forward
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from tests.kernels import device_inputs as device

ORDER = FAMILIES["triton_unscaled"].order
# The e4m3 kernel takes alpha from the difference of maxima; its LSE, which keeps the offset of P, is not compared.
ORDER_E4M3 = replace(ORDER, rescale="of_difference")
CONFIGS = {
    "fp16": Config("fp16", 64, 64, 64, family="triton_unscaled"),
    "bf16": Config("bf16", 64, 64, 64, family="triton_unscaled"),
    "e4m3": Config("e4m3", 64, 64, 64, family="flash3"),
}
MISTAKES = [("keys", "right_to_left"), ("rescale", "of_difference"), ("row_sum", "block_serial"), ("lse", "log2")]


def run(dtype: Dtype, distribution: str, order=ORDER) -> tuple[bool, bool]:
    """Tell whether the twin's binary32 output, and its lse, are the device's.

    There are two heads of 512 x 512 and head_dim 64. The e4m3 kernel's lse is not known.
    """
    arrays = device.attention_operands(dtype, distribution == "outlier")
    key = f"fa_{device.DEVICE_NAMES[dtype]}_64_{distribution}"
    assert device.digest(arrays) == device.stored_digest(key), "inputs are not the device's"
    problem = AttentionProblem(1, 2, 2, 512, 512, 64, dtype=dtype)
    x = Operands(*(a.view(FORMATS[dtype].dtype).transpose(1, 0, 2)[None] for a in arrays))
    got = forward(problem, x, CONFIGS[dtype], ideal=frozenset({"output"}), order=order)
    has_lse = dtype == "e4m3" or device.is_of_the_device(f"{key}_L", got.lse)
    return device.is_of_the_device(f"{key}_O", got.out), has_lse


@pytest.mark.parametrize("distribution", ["normal", "outlier"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_the_twin_reproduces_a_whole_triton_kernel(dtype: Dtype, distribution: str) -> None:
    assert run(dtype, distribution, ORDER_E4M3 if dtype == "e4m3" else ORDER) == (True, True)


@pytest.mark.parametrize(("switch", "value"), MISTAKES)
def test_a_planted_mistake_of_its_order_shows(switch: str, value: str) -> None:
    assert run("fp16", "normal", replace(ORDER, **{switch: value})) != (True, True)
