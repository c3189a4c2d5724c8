"""Attention of other libraries on a CPU as candidates, with the sharpest true order of operations of each.

Nothing heavy is imported before a kernel runs. None claims equal bits of different calls but of repeated ones.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from fa3_kernels.plan.config import Config
from fa3_reference.bounds import KernelModel, SoftmaxOrder
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import Dtype
from fa3verify.kernels.functions import GradientsOf, array_candidate
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Candidate
from fa3verify.operations.backward import GradientConfig
from fa3verify.text import install_hint

_UNFUSED = SoftmaxOrder("unscaled", "always", "any", "normalised")
_BLOCKS = SoftmaxOrder("unscaled", "lazy", "left_to_right", "running")
_ANY_TREE: dict[str, Any] = {"accumulator": "fp32", "keeps_subnormals": False}
CLAIMED = frozenset({"repeated_run_is_identical"})  # checked by a test: properties take long to import
# torch's vectorised exp on a CPU is a polynomial of 20 bits: the lse of peaky rows is off by up to 1e-5 in relative
# weight, which no other library here loses.
TORCH_EXP_ERROR = 2.0**-15


def all_fp32(config: Config) -> KernelModel:
    """torch's MATH on any device: binary32 until the output is rounded."""
    return KernelModel(config.dtype, config.out_dtype, order=_UNFUSED, probabilities="fp32", **_ANY_TREE)


def _rounded_weights(config: Config) -> KernelModel:
    return KernelModel(config.dtype, config.out_dtype, order=_UNFUSED, **_ANY_TREE)


def _rounded_scores(config: Config) -> KernelModel:
    return KernelModel(config.dtype, config.out_dtype, order=_UNFUSED, scores=config.dtype, **_ANY_TREE)


def _torch_flash(config: Config) -> KernelModel:
    return KernelModel(config.dtype, config.out_dtype, order=_BLOCKS, exp_error=TORCH_EXP_ERROR, **_ANY_TREE)


def _fp32_gradients(config: GradientConfig) -> BackwardModel:
    """torch's MATH: binary32 until gradients of single heads are rounded, which are added in 16 bits."""
    return replace(_any_gradients(config), weights="fp32", parts=config.dtype)


def _rounded_gradients(config: GradientConfig) -> BackwardModel:
    """dP, P and dS in 16 bits, S in binary32."""
    return replace(_any_gradients(config), dp=config.dtype, parts=config.dtype)


def _eager_gradients(config: GradientConfig) -> BackwardModel:
    """S, dP, P and dS in 16 bits, as frameworks store what they differentiate."""
    return replace(_rounded_gradients(config), scores=config.dtype)


def _torch_flash_gradients(config: GradientConfig) -> BackwardModel:
    """Blocks of 32 rows and more by 512 keys, whose parts are added to gradients in 16 bits."""
    blocks = {"tile_m": 32, "tile_n": 512, "parts": config.dtype}
    return replace(_any_gradients(config), exp_error=TORCH_EXP_ERROR, **blocks)


def _any_gradients(config: GradientConfig) -> BackwardModel:
    return BackwardModel.any_order(config.dtype, config.forward, accumulator="fp32")


class Kernel(NamedTuple):
    """One kernel of a library: its function in :mod:`fa3verify.known.cpu`, packages and declared facts."""

    function: str
    packages: tuple[str, ...]
    order: Callable[[Any], KernelModel | BackwardModel]
    about: str
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16")
    features: tuple[str, ...] = ("causal", "gqa")
    policy: Policy = Policy(causal="top_left")
    min_seqlen: int = 1
    gradients: GradientsOf = ""


KERNELS = {
    "torch.math": Kernel("torch_math", ("torch",), all_fp32, "torch SDPA, backend MATH, on a CPU", min_seqlen=0),
    "torch.flash": Kernel("torch_flash", ("torch",), _torch_flash, "torch SDPA, backend FLASH, on a CPU"),
    "torch.flex": Kernel(
        "torch_flex",
        ("torch",),
        _rounded_weights,
        "torch FlexAttention, not compiled, on a CPU",
        features=("causal", "gqa", "window", "softcap"),
        policy=Policy(),
    ),
    "jax.xla": Kernel("jax_attention", ("jax",), _rounded_weights, "jax.nn.dot_product_attention, xla, on a CPU"),
    "onnxruntime": Kernel(
        "onnxruntime_attention",
        ("onnx", "onnxruntime"),
        _rounded_scores,
        "ONNX Attention-23 by ONNX Runtime",
        ("fp16",),
    ),
    "transformers.eager": Kernel(
        "transformers_eager",
        ("transformers", "torch"),
        _rounded_scores,
        "Transformers' eager attention on a CPU",
        policy=Policy(empty_out="undefined"),
    ),
}
# FlexAttention has no backward on a CPU, ONNX Runtime none at all.
GRADIENTS = {
    "torch.math": Kernel(
        "torch_math_gradients",
        ("torch",),
        _fp32_gradients,
        "autograd of torch SDPA, backend MATH, on a CPU",
        gradients="own",
    ),
    "torch.flash": Kernel(
        "torch_flash_gradients",
        ("torch",),
        _torch_flash_gradients,
        "backward of torch SDPA's FLASH on a CPU",
        gradients="given",
    ),
    "jax.xla": Kernel(
        "jax_gradients",
        ("jax",),
        _rounded_gradients,
        "vjp of jax.nn.dot_product_attention, xla, on a CPU",
        gradients="own",
    ),
    "transformers.eager": Kernel(
        "transformers_eager_gradients",
        ("transformers", "torch"),
        _eager_gradients,
        "autograd of Transformers' eager attention on a CPU",
        gradients="own",
    ),
}


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of :mod:`fa3verify.known.cpu`, imported when it is called."""

    name: str

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("fa3verify.known.cpu"), self.name)(*arrays, **options)


@dataclass(frozen=True, slots=True)
class _Packages:
    """The identity of a kernel by the versions of its packages; a record so that it can travel to worker processes."""

    names: tuple[str, ...]

    def __call__(self) -> dict[str, str | None]:
        version = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in self.names)
        return {"version": version, "device": f"CPU, {platform.machine()}"}


def _candidates(name: str, kernel: Kernel) -> tuple[Candidate, ...]:
    missing = [package for package in kernel.packages if find_spec(package) is None]
    reason = f"needs {', '.join(missing)}: {install_hint(*missing)}" if missing else None
    made = array_candidate(
        _Function(kernel.function),
        dtypes=kernel.dtypes,
        name=name,
        features=kernel.features,
        order=kernel.order,
        policy=kernel.policy,
        min_seqlen=kernel.min_seqlen,
        description=kernel.about,
        gradients=kernel.gradients,
    )
    known = {"unavailable": reason, "bitwise": CLAIMED, "identity": _Packages(kernel.packages)}
    return tuple(replace(candidate, **known) for candidate in made)


def cpu() -> tuple[Candidate, ...]:
    """Return the kernels, with the reason where a package is missing."""
    named = (*KERNELS.items(), *GRADIENTS.items())
    return tuple(candidate for name, kernel in named for candidate in _candidates(name, kernel))
