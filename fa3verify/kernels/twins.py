"""The CPU twins as kernels under judgement: those that ship, and the function that builds one with changes.

What a twin computes stands in ``fa3_kernels.twin``. Kernels that run on a GPU are listed in :mod:`fa3verify.known`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from fa3_kernels.faults.table import AnyFault, planted
from fa3_kernels.plan.config import Setting
from fa3_kernels.plan.families import FAMILIES, OURS, traits_of
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3verify import operations
from fa3verify.kernels.functions import Facts
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Code, Kernel
from fa3verify.kernels.sizes import Sizes, gathered
from fa3verify.operations.backward import model_of
from fa3verify.operations.forward import Result, changeable, order_of_family
from fa3verify.operations.operation import TWIN
from fa3verify.version import __version__


@dataclass(frozen=True, slots=True)
class Twin(Code):
    """The code of a twin: its operation, changed fields of its configuration, and its planted fault.

    It is a record, so that it can travel to worker processes.
    """

    operation: str
    changes: tuple[tuple[str, Setting], ...] = ()
    fault: AnyFault | None = None

    @property
    def family(self) -> str:
        """Return the family whose plan and bits it has: a key of :data:`fa3_kernels.plan.families.FAMILIES`, or the
        name of a file that holds a learned order.
        """
        return str(dict(self.changes).get("family", OURS))

    @property
    def package(self) -> str:
        """Return the name of the package that computes."""
        return TWIN if self.fault is None else planted(self.fault)

    def configure(self, problem: AttentionProblem) -> Any:
        return operations.find(self.operation).configure(problem, **dict(self.changes))

    def run(self, problem: AttentionProblem, operands: Operands, config: Any) -> Any:
        return operations.find(self.operation).twin(problem, operands, config, self.package)

    def unrounded(self, problem: AttentionProblem, operands: Operands, config: Any) -> Result:
        """Run a twin of a forward up to its last rounding: out is float32."""
        forward = import_module(f"{self.package}.forward").forward
        return Result(*forward(problem, operands, config, ideal=frozenset({"output"})))

    def identity(self) -> dict[str, str | None]:
        """Return the hash of the twin's own sources, and the version of the kernels whose bits it has."""
        from fa3_kernels.twin.compiled import source_hash

        traits = traits_of(self.family)
        version = f"twin of {traits.title} ({traits.version}), fa3verify {__version__}"
        return {"version": version, "sha256": source_hash(), "device": "CPU"}


def twin(
    dtype: Dtype,
    *,
    name: str | None = None,
    fault: AnyFault | None = None,
    description: str = "",
    operation: str = operations.FORWARD,
    **changes: Setting,
) -> Kernel:
    """Build a twin kernel, optionally with a planted fault or ``changes``, fields of its configuration.

    Without a ``name`` it is ``twin.DTYPE``, with ``+FAULT`` behind it where a fault is planted.
    """
    code = Twin(operation, tuple(sorted(changes.items())), fault)
    name = name or f"twin.{dtype}" + (f"+{fault}" if fault else "")
    features = operations.find(operation).features_of(changes)
    free = changeable(dtype, changes, code.family) if operation == operations.FORWARD else frozenset()
    order = model_of if operation == "backward" else order_of_family
    return Kernel(
        name,
        dtype,
        code,
        features,
        description,
        fault=fault,
        operation=operation,
        order=order,
        changeable=free,
    )


# Verified by default.
BUILT_IN: tuple[Kernel, ...] = (
    twin("fp16", description="bit-exact CPU twin of the FP16 forward kernel"),
    twin("bf16", description="bit-exact CPU twin of the BF16 forward kernel"),
    twin("e4m3", description="bit-exact CPU twin of the FP8 forward kernel, P V promoted every 128 keys"),
    twin(
        "e4m3",
        name="twin.quantize",
        operation="quantize",
        description="bit-exact CPU twin of the quantiser to e4m3",
    ),
)


# How FlashAttention-2 splits the keys follows from how many tiles a call has, so that bits of one sequence and head
# depend on the others, on packing and on the mask.
_WHATEVER_THE_SPLITS = frozenset(
    {
        "order_of_sequences_and_heads",
        "repeated_run_is_identical",
        "schedule_switches_change_no_bit",
        "score_scaling_by_powers_of_two",
        "sign_symmetry",
        "value_channels_are_independent",
        "value_scaling_by_powers_of_two",
    }
)


_SERVED = frozenset({"causal", "window", "varlen", "gqa", "paged", "seqused_k", "leftpad", "batch_idx"})
# What kernels of other families declare. The twin and the library itself both take it from here, so that their verdicts
# can be compared. The reasons: cuDNN runs another kernel for one query. The Triton kernel masks no tail. The serving
# builds (vLLM, SGLang) were recorded at head_dim 128 and with keys only, and their sinks are bf16 where a judge's are
# float32, so that no sinks are claimed. FlashAttention-2 takes a part of the keys whose row sum is NaN for an empty
# part, so that lse is finite where out is NaN.
DECLARED: dict[str, Facts] = {
    "cudnn": {"min_seqlen": 2, "policy": Policy(causal="top_left")},
    "flash2": {"policy": Policy(empty_lse="+inf", special_values="out"), "bitwise": _WHATEVER_THE_SPLITS},
    "vllm": {"head_dims": (128,), "min_seqlen": 1, "features": _SERVED},
    "sglang": {"head_dims": (128,), "min_seqlen": 1, "features": _SERVED | {"append", "rotary"}},
    "triton_unscaled": {"head_dims": (64,), "seqlen_multiple": 64, "policy": Policy(special_values="undefined")},
}


def declared(family: str, dtype: Dtype) -> Facts:
    """Return what kernels of a family declare in a format; empty for a family that declares nothing.

    Serving builds do not claim windows in e4m3, because those were never compared with recordings.
    """
    facts = DECLARED.get(family, {})
    if dtype == "e4m3" and "features" in facts:
        return {**facts, "features": frozenset(facts["features"]) - {"window"}}
    return facts


def _unknown(family: str, dtype: Dtype) -> str | None:
    """Return why no bits of a family are known in a format; None where some are.

    The family is asked about a small problem of the first head_dim that it takes.
    """
    first, *_ = DECLARED.get(family, {}).get("head_dims") or (128,)
    head_dim = first if isinstance(first, int) else first[0]
    return FAMILIES[family].refuses(AttentionProblem(1, 1, 1, 64, 64, head_dim, dtype=dtype)) or None


# Built in, but verified only when named.
ON_REQUEST: tuple[Kernel, ...] = (
    twin(
        "e4m3",
        name="twin.e4m3_chained",
        promotion_interval=0,
        description="FP8 twin without promotion, as official FlashAttention-3: loses long-context output",
    ),
    *(
        replace(
            twin(
                dtype,
                name=f"twin.{family}.{dtype}",
                family=family,
                description=f"bit-exact CPU twin of {traits.title} ({traits.version})",
            ),
            **(gathered(declared(family, dtype)) | {"unavailable": _unknown(family, dtype)}),
        )
        for family, traits in FAMILIES.items()
        if traits.is_reproduced and family != OURS
        for dtype in traits.dtypes
    ),
    *(
        replace(
            twin(
                dtype,
                name=f"twin.backward.{dtype}" if family == OURS else f"twin.{family}.backward.{dtype}",
                family=family,
                operation="backward",
                description=f"bit-exact CPU twin of the backward of {traits.title} ({traits.version})",
            ),
            sizes=Sizes(min_seqlen=1),
        )
        for family, traits in FAMILIES.items()
        if traits.backward is not None
        for dtype in traits.dtypes
        if dtype != "e4m3"
    ),
)


TWINS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*BUILT_IN, *ON_REQUEST)}


def is_twin(name: str) -> bool:
    """Tell whether a name is that of a twin of this package, with a fault, head dims or a configuration behind it too.

    >>> is_twin("twin.fp16+stale_v"), is_twin("twin.fp16[tile_n=64]"), is_twin("twin.mine")
    (True, True, False)
    """
    return KernelName.parse(name).base in TWINS
