"""Our kernels over caches and with sinks, as the kernels that are judged call them: the bits of their twins."""

from __future__ import annotations

import pytest

from tests.harness.known.test_gluon import KERNELS, PAIRS, assert_bits_of_the_twin

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_a_kernel_over_a_cache_has_the_bits_of_its_twin(name, kernel):
    assert_bits_of_the_twin(name, KERNELS[kernel])
