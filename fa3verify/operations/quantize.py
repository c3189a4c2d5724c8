"""Quantising q, k and v to e4m3: codes, descales, K mean and LSE correction, from operands in fp16 or bf16.

The problem is the one that the codes are for: its dtype is e4m3, and its mask does not matter. A code is judged with
the descale that the kernel stored, and the descale by itself. Error / bound of a code is the distance of the exact
scaled value from the numbers that round to the code, over the error that binary32 may make in scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from fa3_kernels.faults.table import QuantizerFault
from fa3_kernels.plan.config import Setting
from fa3_kernels.plan.quantizer import (
    MEAN_CHUNK_ROWS,
    MEAN_FINAL_ROWS,
    MEAN_TREE_ROWS,
    ROTATED_HEAD_DIMS,
    QuantizeOptions,
    Scale,
    Scope,
    check_shapes,
)
from fa3_reference.bounds.quantizer import Stored, distance_to_codes, stored_values
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import Quantized, QuantScheme
from fa3_reference.scales import SHARING, num_blocks, rounding_fields
from fa3verify.operations.operation import (
    FEATURES,
    PACKED,
    TWIN,
    Arrays,
    Chosen,
    Configure,
    Descales,
    Names,
    Operation,
    Output,
    Outputs,
    error_ratio,
)

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from fa3verify.inputs.recipe import Recipe

NAMES: tuple[str, ...] = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class QuantizeConfig(QuantizeOptions):
    """Options of the quantiser, and the format it reads."""

    input_dtype: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        QuantizeOptions.__post_init__(self)
        if self.input_dtype not in ("fp16", "bf16"):
            raise ValueError(f"input_dtype must be 'fp16' or 'bf16', got {self.input_dtype!r}")

    def options(self) -> dict[str, Setting]:
        """Return the keywords of ``quantize_qkv``, without its tensors."""
        return {f.name: getattr(self, f.name) for f in fields(QuantizeOptions)}

    def scheme(self) -> QuantScheme:
        """Return the same options in the reference's words."""
        rows_q, rows_k, rows_v = self.block_rows if isinstance(self.block_rows, tuple) else (self.block_rows,) * 3
        return QuantScheme(
            self.scope,
            rows_q,
            rows_k,
            rows_v,
            hadamard_seed=self.seed if self.rotate else None,
            k_mean=self.subtract_k_mean,
            **rounding_fields(self.scale),
        )


def _codes(name: str) -> Output:
    return Output(
        name,
        lambda problem, config: getattr(problem, f"{name}_shape"),
        lambda config: "e4m3",
        ratio=lambda got, truth, bound: error_ratio(distance_to_codes(got.astype(np.float64), truth), bound),
    )


def _descales(name: str) -> Output:
    def shape(problem: AttentionProblem, config: QuantizeConfig) -> tuple[int, ...]:
        rows = config.descale_rows[NAMES.index(name)]
        heads, seqlen = (problem.nheads, problem.seqlen_q) if name == "q" else (problem.nheads_kv, problem.seqlen_k)
        return problem.batch, heads, num_blocks(seqlen, rows)

    return Output(f"{name}_descale", shape, lambda config: "fp32", main=False)


def _with_mean(name: str, shape: Callable[[AttentionProblem], tuple[int, ...]], unit: str = "1") -> Output:
    return Output(
        name,
        lambda problem, config: shape(problem) if config.subtract_k_mean else None,
        lambda config: "fp32",
        main=False,
        unit=unit,
    )


def stated_scale(problem: AttentionProblem) -> float | None:
    """Return the softmax_scale to pass: None where it is the default, so that the quantiser's own default is tested."""
    default = replace(problem, softmax_scale=None).softmax_scale
    return None if problem.softmax_scale == default else problem.softmax_scale


def mean_additions(seqlen: int) -> int:
    """Return the longest chain of additions in the kernel's K mean: slices of a chunk, its tree, then over chunks."""
    chunks = max(1, -(-seqlen // MEAN_CHUNK_ROWS))
    slices = MEAN_CHUNK_ROWS // MEAN_TREE_ROWS + -(-chunks // MEAN_FINAL_ROWS)
    return slices + (MEAN_TREE_ROWS * MEAN_FINAL_ROWS).bit_length()


# One set of options per shape, in turn: a K mean for packed sequences of several lengths, one scale for a group of
# query heads, blocks of several sizes, exact scaling by powers of two, no rotation where head_dim is no power of two.
_SHAPES = (
    PACKED,
    AttentionProblem(2, 4, 2, 40, 161, 64, 32),
    AttentionProblem(1, 2, 2, 33, 97, 96),
    AttentionProblem(1, 2, 1, 33, 130, 256),
    AttentionProblem(1, 1, 1, 64, 17001, 64),
)
_QUICK = len(_SHAPES) - 1
_OPTIONS: tuple[dict[str, Setting], ...] = (
    {"block_rows": (64, 32, 128), "rotate": True, "subtract_k_mean": True, "seed": 1},
    {"scope": "head", "rotate": True, "input_dtype": "bf16"},
    {"block_rows": 32, "scale": "power_of_two"},
    {"scope": "head", "scale": "power_of_two", "rotate": True, "subtract_k_mean": True, "input_dtype": "bf16"},
    {"block_rows": (128, 192, 64), "subtract_k_mean": True},
)


class Quantize(Operation):
    """e4m3 codes and descales of q, k and v, with what centring K takes from the lse."""

    name = "quantize"
    outputs = (
        *map(_codes, NAMES),
        *map(_descales, NAMES),
        _with_mean("k_mean", lambda problem: (problem.batch, problem.nheads_kv, problem.head_dim)),
        _with_mean("lse_correction", lambda problem: problem.lse_shape, "nat"),
    )
    config = QuantizeConfig
    features = FEATURES - {"softcap", "block_descale"}
    faults = QuantizerFault
    judges_choices = True

    def configure(self, problem: AttentionProblem, **changes: Any) -> QuantizeConfig:
        config = QuantizeConfig(**changes)
        check_shapes(problem.q_shape, problem.k_shape, problem.v_shape, config)
        return config

    def twin(
        self,
        problem: AttentionProblem,
        operands: Operands,
        config: QuantizeConfig,
        package: str = TWIN,
    ) -> Any:
        quantize_qkv = import_module(f"{package}.quantize").quantize_qkv
        options = config.options() | {"softmax_scale": stated_scale(problem)}
        if problem.is_varlen:
            options |= {"cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k}
        return quantize_qkv(operands.q, operands.k, operands.v, **options)

    def prepare(
        self, problem: AttentionProblem, arrays: Arrays, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> Quantized:
        fmt = FORMATS[str(changes.get("input_dtype", "fp16"))]
        q, k, v = (encode(x, fmt, "ieee") for x in arrays)
        return Quantized(Operands(q, k, v))

    def truth(self, problem: AttentionProblem, arrays: Arrays, config: QuantizeConfig, got: Outputs) -> Outputs:
        return self._stored(problem, arrays, config, got)[0]

    def bound(self, problem: AttentionProblem, operands: Operands, assumed: QuantizeConfig, got: Outputs) -> Outputs:
        return self._stored(problem, operands.dequantized(problem), assumed, got)[1]

    def _stored(
        self, problem: AttentionProblem, arrays: Arrays, config: QuantizeConfig, got: Outputs
    ) -> tuple[Stored, Stored]:
        descales = (got["q_descale"], got["k_descale"], got["v_descale"])
        q, k, v = arrays
        return stored_values(problem, (q, k, v), config.scheme(), descales, mean_additions(problem.seqlen_k))

    def shapes(self, of_forward: tuple[AttentionProblem, ...], *, is_quick: bool) -> tuple[AttentionProblem, ...]:
        return _SHAPES[:_QUICK] if is_quick else _SHAPES

    def choices(
        self, problem: AttentionProblem, recipe: Recipe, index: int, features: Names, changeable: Names
    ) -> Chosen:
        options = dict(_OPTIONS[index % len(_OPTIONS)])
        if problem.head_dim not in ROTATED_HEAD_DIMS:
            options.pop("rotate", None)
        return None, tuple(sorted(options.items()))

    def descales_of(
        self, problem: AttentionProblem, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> frozenset[str]:
        scope = cast(Scope, changes.get("scope", QuantizeOptions().scope))
        return SHARING[scope].claim(problem.group) & self.features

    def draw_choices(
        self, draw: DrawFn, problem: AttentionProblem, features: Names, configure: Configure, descales: Descales
    ) -> Chosen:
        # ``configure`` and ``descales`` are for operations that read descales; the quantiser writes them.
        from hypothesis import strategies as st

        def is_taken(scope: Scope) -> bool:
            # Only "query_head" has a claim left, where 2 query heads share a kv head; without groups it equals "head".
            claim = SHARING[scope].claim(2) & self.features
            return not claim or (problem.group > 1 and claim <= features)

        options = {
            # one size for q, k and v, or one each; legal are multiples of 32
            "block_rows": draw(st.sampled_from((128, 32, (32, 64, 128), (192, 128, 32)))),
            "scope": draw(st.sampled_from([scope for scope in get_args(Scope) if is_taken(scope)])),
            "scale": draw(st.sampled_from(get_args(Scale))),
            "rotate": problem.head_dim in ROTATED_HEAD_DIMS and draw(st.booleans()),
            "subtract_k_mean": draw(st.booleans()),
            "seed": draw(
                st.sampled_from((0, 1, 258, 2**32 + 3))
            ),  # of the rotation's signs; some fill no byte, no word
            "input_dtype": draw(st.sampled_from(("fp16", "bf16"))),
        }
        return None, tuple(sorted(options.items()))
