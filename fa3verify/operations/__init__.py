"""The operations whose kernels can be judged: a row here, and a file that says what is its own."""

from __future__ import annotations

from fa3_kernels.plan.backward import BackwardConfig
from fa3_kernels.plan.config import Config
from fa3verify.operations.backward import Backward, GradientConfig
from fa3verify.operations.forward import Forward
from fa3verify.operations.operation import DESCALES as DESCALES
from fa3verify.operations.operation import FEATURES as FEATURES
from fa3verify.operations.operation import Operation as Operation
from fa3verify.operations.operation import Output as Output
from fa3verify.operations.operation import Outputs as Outputs
from fa3verify.operations.operation import WrongOutput as WrongOutput
from fa3verify.operations.quantize import Quantize, QuantizeConfig

AnyConfig = Config | BackwardConfig | GradientConfig | QuantizeConfig  # of a kernel, by its operation
FORWARD = Forward.name  # what a kernel or a case computes unless it says otherwise
OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (Forward(), Quantize(), Backward())}


def find(name: str) -> Operation:
    """Return an operation by name; ValueError names what exists."""
    if name not in OPERATIONS:
        raise ValueError(f"unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]
