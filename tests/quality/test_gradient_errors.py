"""Our gradients err no more than the released FlashAttention-3's on the same inputs."""

from __future__ import annotations

import pytest

from tests.quality.gradient_errors import FAMILIES, INPUTS, errors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("inputs", INPUTS)
def test_our_gradients_err_as_much_as_those_of_flash_attention_3(inputs: str, causal: bool) -> None:
    """Behind the same forward the two round the same numbers, all but a few of them alike."""
    ours, theirs = (errors(family, inputs, causal, 1, 512, 0, "flash3.dew") for family in FAMILIES)
    assert all(0 < mine <= 1.002 * other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)
