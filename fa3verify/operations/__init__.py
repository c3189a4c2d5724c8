"""The operations whose kernels can be judged: forward, quantise, backward and merge, each with a file of its own.

:mod:`fa3verify.operations.operation` defines what the harness must know of each.
"""

from __future__ import annotations

from fa3_kernels.plan.backward import BackwardConfig
from fa3_kernels.plan.config import Config
from fa3verify.operations.backward import Backward, GradientConfig
from fa3verify.operations.forward import Forward, ForwardConfig
from fa3verify.operations.merge import Merge, MergeConfig
from fa3verify.operations.operation import (
    DESCALES as DESCALES,
    FEATURES as FEATURES,
    Operation as Operation,
    Output as Output,
    Outputs as Outputs,
    WrongOutput as WrongOutput,
)
from fa3verify.operations.quantize import Quantize, QuantizeConfig

AnyConfig = (
    Config | ForwardConfig | BackwardConfig | GradientConfig | QuantizeConfig | MergeConfig
)  # a kernel's, by its operation
FORWARD = Forward.name  # the operation of a kernel or a case that names none
OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (Forward(), Quantize(), Backward(), Merge())
}


def find(name: str) -> Operation:
    """Return an operation by name; ValueError names what exists."""
    if name not in OPERATIONS:
        raise ValueError(f"unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]
