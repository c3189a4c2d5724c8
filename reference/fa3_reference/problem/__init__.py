"""What is to be computed: one attention problem, and the operands that a kernel sees.

The problem is in ``record``, what its sizes say of its tensors in ``shapes``, and the arrays that a kernel is given in
``operands``. Import their names from here.
"""

from fa3_reference.problem.operands import Array as Array
from fa3_reference.problem.operands import BackwardOperands as BackwardOperands
from fa3_reference.problem.operands import Descale as Descale
from fa3_reference.problem.operands import Floats as Floats
from fa3_reference.problem.operands import Operands as Operands
from fa3_reference.problem.record import DTYPES as DTYPES
from fa3_reference.problem.record import MAX_HEAD_DIM_V as MAX_HEAD_DIM_V
from fa3_reference.problem.record import AttentionProblem as AttentionProblem
from fa3_reference.problem.record import Dtype as Dtype
from fa3_reference.problem.shapes import Element as Element
from fa3_reference.problem.shapes import Sequence as Sequence
