"""The plugin for pytest: the properties and families of a campaign as tests in a user's own repository.

It does nothing, and imports nothing large, unless a kernel is named: by ``--fa3-kernel``, or in a conftest by

    fa3_kernels = ["mykernel:attention"]

The tests then belong to that conftest, one for each property and family of each kernel
(:mod:`fa3verify.conformance`); ``fa3_kernel``, ``fa3_truth`` and ``fa3_bound`` are for tests of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fa3verify.cases.case import Case
    from fa3verify.kernels.record import Kernel
    from fa3verify.operations import Outputs

LINE = "fa3_kernels"  # the variable of a conftest that names kernels; empty if only the command line names them


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, whose names all begin with --fa3."""
    add = parser.getgroup("fa3verify", "attention kernels judged by fa3verify").addoption
    add("--fa3-kernel", action="append", default=[], metavar="NAME", help="judge this kernel, module:function")
    add("--fa3-profile", choices=("quick", "release", "soak"), default="quick", help="how much is tried")
    add("--fa3-seed", type=int, default=0, metavar="N", help="seed of every draw")
    add("--fa3-skips", type=Path, metavar="FILE", help="tests to skip; fa3_skips.txt beside the conftest by default")
    add("--fa3-xfails", type=Path, metavar="FILE", help="tests that must fail; fa3_xfails.txt by default")


def kernels_at(config: pytest.Config, path: Path) -> list[str]:
    """Return the kernels to judge at a path: of the command line, else of the conftests of its folder and above it."""
    if option := config.getoption("--fa3-kernel"):
        return list(dict.fromkeys(option))
    named = (kernels for conftest, kernels in _lines(config) if path.is_relative_to(conftest.parent))
    return list(dict.fromkeys(name for kernels in named for name in kernels))


def _lines(config: pytest.Config) -> list[tuple[Path, list[str]]]:
    """Return every loaded conftest that has the variable, with the kernels that it names."""
    plugins = [plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, LINE)]
    return [(Path(plugin.__file__), list(getattr(plugin, LINE))) for plugin in plugins]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the kernels' tests at a conftest that has the variable; None for any other file."""
    if file_path.name != "conftest.py" or file_path not in (path for path, _ in _lines(parent.config)):
        return None
    if not (kernels := kernels_at(parent.config, file_path)):
        return None
    from fa3verify.conformance import Conformance

    return Conformance.from_parent(parent, path=file_path, kernels=kernels)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses ``fa3_kernel`` once with every kernel; it is skipped if none is named."""
    if "fa3_kernel" in metafunc.fixturenames:
        absent = pytest.param(None, marks=pytest.mark.skip(reason="no kernel is named: --fa3-kernel NAME"), id="none")
        kernels = kernels_at(metafunc.config, metafunc.definition.path) or [absent]
        metafunc.parametrize("fa3_kernel", kernels, indirect=True, scope="session")


@pytest.fixture(scope="session")
def fa3_kernel(request: pytest.FixtureRequest) -> Kernel:
    """A kernel under test, a :class:`fa3verify.Kernel`; skipped where it cannot run here."""
    from fa3verify.known import registry

    kernel = registry.find(request.param)
    if kernel.unavailable:
        pytest.skip(kernel.unavailable)
    return kernel


@pytest.fixture(scope="session")
def fa3_truth(fa3_kernel: Kernel) -> Callable[..., Outputs]:
    """``fa3_truth(case)``: exact outputs by name, in float64, of what the kernel sees of a case's inputs.

    An operation whose truth depends on choices of the kernel, such as a quantiser, takes its outputs as ``got``.
    """

    def truth(case: Case, got: Outputs | None = None) -> Outputs:
        from fa3verify.properties.law import set_up

        return set_up(fa3_kernel, case).truth(got or {})

    return truth


@pytest.fixture(scope="session")
def fa3_bound(fa3_kernel: Kernel) -> Callable[..., Outputs]:
    """``fa3_bound(case)``: by name, how far from the truth each output may lie, in float64; infinite where nothing is
    promised. ``got`` is as for ``fa3_truth``. Of a kernel that states no order it is the bound under a ``hypothesis``
    of :func:`fa3verify.judging.hypotheses.under`, the first by default.
    """

    def bound(case: Case, got: Outputs | None = None, hypothesis: str = "") -> Outputs:
        from fa3verify.judging.hypotheses import under
        from fa3verify.properties.law import set_up

        kernel = under(fa3_kernel)[hypothesis] if hypothesis else fa3_kernel
        return set_up(kernel, case).bound(got)

    return bound
