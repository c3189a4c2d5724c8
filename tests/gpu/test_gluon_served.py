"""Our kernels over caches and with sinks, as the candidates that are judged call them: the bits of their twins."""

from __future__ import annotations

import pytest

from fa3verify.kernels import calls
from fa3verify.known import registry
from tests.harness.known.test_gluon import KERNELS, PAIRS, case_of, configs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_a_kernel_over_a_cache_has_the_bits_of_its_twin(name, kernel):
    kernel = KERNELS[kernel]
    case = case_of(name, kernel)
    operands = case.operands()
    for config in configs(kernel, case.problem):
        got = calls.run(kernel, case.problem, operands, config)
        want = calls.run(registry.find(kernel.twin), case.problem, operands, config)
        for output, x in got.items():
            bits = f"u{x.itemsize}"
            assert (x.view(bits) == want[output].view(bits)).all(), (output, config)
