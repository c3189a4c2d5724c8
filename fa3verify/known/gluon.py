"""Our GPU kernels as kernels under judgement: forwards, backward and quantiser.

They are listed on every machine, with the reason where they cannot run. :mod:`fa3verify.known.device` calls them.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3_kernels.plan.backward import BackwardConfig
from fa3_kernels.plan.choose import config_of, over_cache
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_reference.cache import Cache, with_cache
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3_reference.rules import require
from fa3verify import operations
from fa3verify.kernels.record import Functions, Kernel
from fa3verify.kernels.sizes import Sizes
from fa3verify.kernels.twins import TWINS
from fa3verify.operations import FEATURES
from fa3verify.operations.backward import model_of
from fa3verify.operations.forward import Result, changeable, order_of_family
from fa3verify.operations.quantize import QuantizeConfig, stated_scale
from fa3verify.tensors.here import unavailable
from fa3verify.version import __version__

if TYPE_CHECKING:
    from fa3verify.known.launches import Keywords

# Options of a launch, beside the tile, and those of e4m3 alone; by whether it is one of flash_attn_with_kvcache.
_CHOICES = {
    False: (("num_splits", "pack_gqa", "pingpong", "intra_wg_overlap"), ("promotion_interval", "out_dtype")),
    True: (("num_splits", "pack_gqa"), ("promotion_interval",)),
}
# In turn: copied by TMA, or gathered where no tile is made of them.
_PAGE_SIZES = (16, 64, 1, 8, 256, 48, 32, 128, 4, 512)


def _identity(*parts: str) -> dict[str, str | None]:
    """Return the version, one hash of everything that these parts of the library launch, and the name of the GPU."""
    from fa3_kernels.audit.evidence import evidence_sha256
    from fa3verify.known.launches import device_name

    launches = "\n".join(map(evidence_sha256, parts))
    sha256 = launches if len(parts) == 1 else hashlib.sha256(launches.encode()).hexdigest()
    return {"version": f"fa3verify {__version__}", "sha256": sha256, "device": device_name()}


def _serves(problem: AttentionProblem) -> bool:
    """Tell whether a call is one over a cache; chunks are taken by all."""
    return bool(problem.serving - {"attention_chunk"})


def configure(problem: AttentionProblem, **options: Any) -> Config:
    """Return the configuration that a launch with these options has.

    Parameters
    ----------
    problem : AttentionProblem
        With a cache or sinks the launch is that of :func:`fa3_kernels.api.flash_attn_with_kvcache`; with sinks but
        without a cache the keys are put into the rows of one.
    **options
        Options of :func:`fa3_kernels.plan.choose.config_of`.

    Raises
    ------
    ValueError
        For what no launch takes.
    """
    if not _serves(problem):
        return config_of(problem, **options)
    problem = with_cache(problem, Cache())
    return over_cache(problem, config_of(problem, **options))


def launch_options(problem: AttentionProblem, config: Config) -> Keywords:
    """Return the options with which a launch has this very configuration; ValueError where none give it."""
    serves = _serves(problem)
    of_all, of_e4m3 = _CHOICES[serves]
    names = of_all + of_e4m3 if problem.dtype == "e4m3" else of_all
    options: Keywords = {name: getattr(config, name) for name in names}
    if serves:
        # A property may bring the configuration of a call without a cache.
        config = over_cache(with_cache(problem, Cache()), config)
    else:
        options["tile"] = (config.tile_m, config.tile_n)
    if configure(problem, **options) != config:
        where = " over a cache only" if serves else " only tile,"
        raise ValueError(f"of a GPU kernel's configuration{where} {', '.join(names)} can be changed")
    return options


def _forward(problem: AttentionProblem, operands: Operands, config: Config) -> Result:
    options = launch_options(problem, config)
    from fa3verify.known import device

    run = device.run_served if _serves(problem) else device.run_forward
    return Result(*run(problem, operands, options))


def _quantise(problem: AttentionProblem, operands: Operands, config: QuantizeConfig) -> dict[str, np.ndarray]:
    """Run our quantiser; its outputs by name."""
    from fa3verify.known.device import run_quantiser
    from fa3verify.tensors.convert import to_numpy

    arrays = {name: getattr(operands, name) for name in "qkv"}
    if problem.is_varlen:
        arrays |= {name: getattr(problem, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    stored = run_quantiser(arrays, {"softmax_scale": stated_scale(problem), **config.options()})
    named = {output.name: getattr(stored, output.name) for output in operations.find("quantize").outputs}
    return {name: to_numpy(x) for name, x in named.items() if x is not None}


def _configure_backward(problem: AttentionProblem) -> BackwardConfig:
    return operations.find("backward").configure(problem, family=OURS)


def _own_backward(problem: AttentionProblem, config: BackwardConfig) -> None:
    """Raise ValueError for a configuration of which a caller would choose anything."""
    require(config == _configure_backward(problem), "a caller chooses nothing of a configuration")


def _backward(problem: AttentionProblem, operands: Operands, config: BackwardConfig) -> tuple[Any, ...]:
    from fa3verify.known import launches

    return launches.run("gluon.deterministic", problem, operands, {})


# Name, dtype, fixed options and description of our forwards; the first three ship.
_FORWARDS: tuple[tuple[str, Dtype, Keywords, str], ...] = (
    ("fp16", "fp16", {}, "FP16 forward"),
    ("bf16", "bf16", {}, "BF16 forward"),
    ("e4m3", "e4m3", {}, "FP8 forward, P V promoted every 128 keys"),
    (
        "e4m3_chained",
        "e4m3",
        {"promotion_interval": 0},
        "FP8 forward without promotion, as official FlashAttention-3",
    ),
)


def gpu() -> tuple[Kernel, ...]:
    """Return the GPU kernels, with the reason where they cannot run."""
    reason = unavailable()
    forwards = (
        Kernel(
            f"gluon.{name}",
            dtype,
            Functions(
                _forward,
                partial(configure, **options),
                launch_options,
                partial(_identity, "forward", "packed", "paged"),
            ),
            # rotated operands of e4m3 have no twin
            (FEATURES | traits_of(OURS).serving) - {"rotary" if dtype == "e4m3" else "block_descale"},
            f"{about} on a Hopper GPU",
            reason,
            twin=TWINS[f"twin.{name}"],
            order=order_of_family,
            changeable=changeable(dtype, options),
            page_sizes=_PAGE_SIZES,
        )
        for name, dtype, options, about in _FORWARDS
    )
    return (*forwards, _backward_of("fp16", reason), _backward_of("bf16", reason), _quantiser(reason))


def _backward_of(dtype: Dtype, reason: str | None) -> Kernel:
    operation = operations.find("backward")
    return Kernel(
        f"gluon.backward.{dtype}",
        dtype,
        Functions(_backward, _configure_backward, _own_backward, partial(_identity, "backward")),
        operation.features_of({"family": OURS}),
        f"deterministic {dtype.upper()} backward on a Hopper GPU",
        reason,
        twin=TWINS[f"twin.backward.{dtype}"],
        operation="backward",
        order=model_of,
        sizes=Sizes(min_seqlen=1),
    )


def _quantiser(reason: str | None) -> Kernel:
    operation = operations.find("quantize")
    return Kernel(
        "gluon.quantize",
        "e4m3",
        Functions(_quantise, operation.configure),
        operation.features,
        "quantiser to e4m3 on a Hopper GPU",
        reason,
        twin=TWINS["twin.quantize"],
        operation="quantize",
    )
