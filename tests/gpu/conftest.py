"""Fixtures of the GPU tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def poisoned_memory():
    """torch.empty comes filled with NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
