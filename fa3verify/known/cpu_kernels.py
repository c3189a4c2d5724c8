"""Attention of other libraries on a CPU as kernels, each with the order of operations that its error bound assumes.

The calls themselves stand in :mod:`fa3verify.known.cpu`, which is imported when a kernel runs. None of the kernels
claims equal bits of different calls; all claim that a repeated call has equal bits.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from fa3_kernels.plan.config import Config
from fa3_reference.bounds import KernelModel, SoftmaxOrder
from fa3_reference.bounds.device import EX2_REL
from fa3_reference.bounds.model import BackwardModel
from fa3verify.kernels.functions import FunctionFacts, array_kernel
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Kernel
from fa3verify.operations.backward import GradientConfig
from fa3verify.text import install_hint

_UNFUSED = SoftmaxOrder("unscaled", "always", "any", "normalised")
_BLOCKS = SoftmaxOrder("unscaled", "lazy", "left_to_right", "running")
Order = Callable[[Any], KernelModel | BackwardModel]
CLAIMED = frozenset({"repeated_run_is_identical"})  # a name of a property; written out, as these take long to import
# Relative error of torch's vectorised exp in 16-bit calls on a CPU, which no other library here has: among 1.2 million
# rows the lse is off by up to 1.1e-4 (torch 2.13, AVX-512).
TORCH_EXP_ERROR = 2.0**-12


def _any_tree(config: Config, order: SoftmaxOrder, **more: Any) -> KernelModel:
    """Return the model of sums in binary32 in any order, whose products lose subnormals."""
    kept = {"accumulator": "fp32", "keeps_subnormals": False}
    return KernelModel(config.dtype, config.out_dtype, order=order, **kept, **more)


# The model of torch's MATH on any device, which computes in binary32 until it rounds the output.
all_fp32 = partial(_any_tree, order=_UNFUSED, probabilities="fp32")
_rounded_weights = partial(_any_tree, order=_UNFUSED)


def rounded_scores(config: Config) -> KernelModel:
    return _any_tree(config, _UNFUSED, scores=config.dtype)


def _torch_flash(config: Config) -> KernelModel:
    return _any_tree(config, _BLOCKS, exp_error=4 * EX2_REL if config.dtype == "fp32" else TORCH_EXP_ERROR)


def _gradients(config: GradientConfig, *, rounded: tuple[str, ...], **steps: Any) -> BackwardModel:
    """Return a model of sums in binary32, with the ``rounded`` steps in the operands' format and others as given."""
    model = BackwardModel.any_order(config.dtype, config.forward, accumulator="fp32")
    return replace(model, **dict.fromkeys(rounded, config.dtype), **steps)


# torch's MATH: gradients of single heads are computed in binary32, rounded, and then added in 16 bits.
_fp32_gradients = partial(_gradients, rounded=("parts",), weights="fp32")
# dP, P and dS in 16 bits and S in binary32.
_rounded_gradients = partial(_gradients, rounded=("dp", "parts"))
# S as well, as frameworks store it to differentiate.
_eager_gradients = partial(_gradients, rounded=("scores", "dp", "parts"))
# Blocks of at least 32 rows by 512 keys, whose parts are added to gradients in 16 bits.
_torch_flash_gradients = partial(_gradients, rounded=("parts",), exp_error=TORCH_EXP_ERROR, tile_m=32, tile_n=512)


def _call(function: str, *arrays: Any, **options: Any) -> Any:
    """Call a function of :mod:`fa3verify.known.cpu`, which is imported no earlier."""
    return getattr(importlib.import_module("fa3verify.known.cpu"), function)(*arrays, **options)


def _identity(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Return the versions of a kernel's packages, and the machine."""
    version = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return {"version": version, "device": f"CPU, {platform.machine()}"}


# Name, function of :mod:`fa3verify.known.cpu`, packages that it needs, order of operations, description, and what else
# is declared. FlexAttention has no backward on a CPU, ONNX Runtime none at all.
_TORCH = ("torch",)
_TRANSFORMERS = ("transformers", "torch")
_FLEX: FunctionFacts = {"features": ("causal", "gqa", "window", "softcap"), "policy": Policy()}
_EAGER: FunctionFacts = {"policy": Policy(empty_out="mean", special_values="visible")}
_ADDED: FunctionFacts = {"policy": Policy(causal="top_left", special_values="visible")}  # to the scores: 0 or -inf
_AUTOGRAD: FunctionFacts = {"gradients": "autograd"}
_MASKED: FunctionFacts = {
    "features": ("gqa", "bias", "bias_fp32", "attn_mask"),
    "policy": Policy(special_values="visible"),
}
_MODIFIED: FunctionFacts = {"features": ("gqa", "alibi", "documents"), "policy": Policy()}
# Hidden keys have the format's least number added to their scores, which still weigh them where a row sees no other.
_LEAST = Policy(empty_out="undefined", special_values="visible")
_T5: FunctionFacts = {"features": ("bias", "attn_mask"), "policy": _LEAST}
_BLOOM: FunctionFacts = {"features": ("causal", "alibi"), "always": ("causal",), "policy": _LEAST}
_AND_FP32: FunctionFacts = {"dtypes": ("fp16", "bf16", "fp32")}
_MATH = "torch SDPA, backend MATH, on a CPU"
_XLA = "jax.nn.dot_product_attention, xla, on a CPU"
_OF_TRANSFORMERS = "Transformers' eager attention on a CPU"
_KERNELS: tuple[tuple[str, str, tuple[str, ...], Order, str, FunctionFacts], ...] = (
    ("torch.math", "torch_math", _TORCH, all_fp32, _MATH, _ADDED | _AND_FP32 | {"min_seqlen": 0}),
    ("torch.flash", "torch_flash", _TORCH, _torch_flash, "torch SDPA, backend FLASH, on a CPU", _AND_FP32),
    ("torch.flex", "torch_flex", _TORCH, _rounded_weights, "torch FlexAttention, not compiled, on a CPU", _FLEX),
    ("torch.sdpa_masked", "torch_sdpa_masked", _TORCH, _torch_flash, "torch SDPA with attn_mask, on a CPU", _MASKED),
    (
        "torch.flex_modified",
        "torch_flex_modified",
        _TORCH,
        _rounded_weights,
        "torch FlexAttention with ALiBi or documents, not compiled, on a CPU",
        _MODIFIED,
    ),
    ("jax.xla", "jax_attention", ("jax",), _rounded_weights, _XLA, {}),
    (
        "onnxruntime",
        "onnxruntime_attention",
        ("onnx", "onnxruntime"),
        rounded_scores,
        "ONNX Attention-23 by ONNX Runtime",
        _ADDED | {"dtypes": ("fp16",)},
    ),
    ("transformers.eager", "transformers_eager", _TRANSFORMERS, rounded_scores, _OF_TRANSFORMERS, _EAGER),
    (
        "transformers.t5",
        "transformers_t5",
        _TRANSFORMERS,
        rounded_scores,
        "T5's attention of Transformers, on a CPU",
        _T5,
    ),
    (
        "transformers.bloom",
        "transformers_bloom",
        _TRANSFORMERS,
        rounded_scores,
        "BLOOM's attention of Transformers, on a CPU",
        _BLOOM,
    ),
    ("torch.math", "torch_math", _TORCH, _fp32_gradients, f"autograd of {_MATH}", _AUTOGRAD | _AND_FP32),
    (
        "torch.flash",
        "torch_flash_gradients",
        _TORCH,
        _torch_flash_gradients,
        "backward of torch SDPA's FLASH on a CPU",
        {"gradients": "given"},
    ),
    ("jax.xla", "jax_gradients", ("jax",), _rounded_gradients, f"vjp of {_XLA}", {"gradients": "own"}),
    (
        "transformers.eager",
        "transformers_eager",
        _TRANSFORMERS,
        _eager_gradients,
        f"autograd of {_OF_TRANSFORMERS}",
        _AUTOGRAD | _EAGER,
    ),
)


def cpu() -> tuple[Kernel, ...]:
    """Return the kernels of all rows and dtypes, with the reason where a package is missing."""
    kernels: list[Kernel] = []
    for name, function, packages, order, about, facts in _KERNELS:
        missing = [package for package in packages if find_spec(package) is None]
        declared: FunctionFacts = {
            "name": name,
            "dtypes": ("fp16", "bf16"),
            "order": order,
            "description": about,
            "policy": Policy(causal="top_left"),
            "min_seqlen": 1,
            "bitwise": CLAIMED,
            "identity": partial(_identity, packages),
            "unavailable": f"needs {', '.join(missing)}: {install_hint(*missing)}" if missing else None,
        }
        library = "torch" if "torch" in packages else "numpy"
        kernels += array_kernel(partial(_call, function), library=library, **(declared | facts))
    return tuple(kernels)
