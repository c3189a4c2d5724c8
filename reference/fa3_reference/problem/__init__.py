"""What is to be computed: one attention problem, and the operands that a kernel sees.

The problem is in ``record``, what its sizes say of its tensors in ``shapes``, and the arrays that a kernel is given in
``operands``. Import their names from here.
"""

from fa3_reference.problem.operands import (
    Array as Array,
    BackwardOperands as BackwardOperands,
    Descale as Descale,
    Floats as Floats,
    Operands as Operands,
)
from fa3_reference.problem.record import (
    DTYPES as DTYPES,
    MAX_HEAD_DIM_V as MAX_HEAD_DIM_V,
    AttentionProblem as AttentionProblem,
    Dtype as Dtype,
)
from fa3_reference.problem.shapes import Element as Element, Sequence as Sequence
