"""The SM clock that a burst of launches runs at: what a launch keeps busy decides how much power it draws.

With the activity A = base + tensor * (share of time in which the tensor core works) + smem * (that of the port of
shared memory), the clock is largest_mhz * A^-exponent where A is above 1, else largest_mhz. ``tensor`` depends on the
dtype. The parameters are fitted, on one kind of GPU under one power cap; they stand in a machine file's table [clock],
and ``python -m fa3_reports.measured.clock_fit`` fits them. Cycles do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import AnyConfig, operations
from fa3_simulator.machine import Machine
from fa3_simulator.run import Estimate, estimate


def busy_shares(found: Estimate) -> tuple[float, float]:
    """Return the shares of time in which the tensor core, and the port of shared memory, work in the longest CTA.

    Where HBM binds, that CTA waits until HBM has moved every tensor.
    """
    longest = max(found.cta_cycles, found.hbm_cycles)
    return found.tensor_cycles / longest, found.smem_cycles / longest


def clock_under_load(machine: Machine, dtype: str, tensor: float, smem: float) -> float | None:
    """Return the predicted SM clock in MHz of a burst of launches, None for a machine whose clock nobody fitted.

    Parameters
    ----------
    machine : Machine
        The GPU.
    dtype : {"fp16", "bf16", "e4m3"}
        Operands of the products.
    tensor, smem : float
        As :func:`busy_shares` returns them.

    Examples
    --------
    >>> from fa3_simulator.machine import load
    >>> clock_under_load(load("h200"), "fp16", 0.1, 0.1), clock_under_load(load("h100"), "fp16", 0.1, 0.1)
    (1800.0, None)
    """
    if not machine.clock:
        return None
    fitted = {name: constant.value for name, constant in machine.clock.items()}
    activity = fitted["base"] + fitted[f"tensor_{dtype}"] * tensor + fitted["smem"] * smem
    return fitted["largest_mhz"] * max(1.0, activity) ** -fitted["exponent"]


def under_load(
    machine: Machine, dtype: str, found: Estimate, again: Callable[[float], Estimate], operations: float
) -> dict[str, float]:
    """Return MHz, milliseconds and TFLOP/s of a launch at its predicted clock.

    ``found`` is its estimate at the machine's maximum clock. ``again`` simulates it at the predicted one, as memory
    does not follow the SM clock. {} for an estimate at another clock, which somebody asked for, and for a machine whose
    clock nobody fitted.
    """
    mhz = clock_under_load(machine, dtype, *busy_shares(found))
    if mhz is None or found.clock_mhz != machine["max_clock_mhz"]:
        return {}
    seconds = again(mhz).seconds
    return {
        "clock_under_load_mhz": mhz,
        "milliseconds_under_load": seconds * 1e3,
        "tflops_under_load": operations / seconds / 1e12,
    }


def config_under_load(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, found: Estimate
) -> dict[str, float]:
    """Return what :func:`under_load` says of the launch of a configuration."""
    again = partial(estimate, problem, config, machine)
    return under_load(machine, problem.dtype, found, again, operations(problem, config))
