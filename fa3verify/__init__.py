"""fa3verify: numerics verification and schedule simulation for FlashAttention-3 on NVIDIA Hopper.

Everything a user needs is a name of this module, imported when it is first asked for: ``import fa3verify`` costs
nothing, and only GPU kernels import torch.

>>> import fa3verify
>>> problem = fa3verify.AttentionProblem(1, nheads=2, nheads_kv=1, seqlen_q=64, seqlen_k=64, head_dim=64, causal=True)
>>> judged = fa3verify.judge("twin.fp16", problem, fa3verify.Recipe("peaky", {"gain": 4}))
>>> judged.measures["ratio_max"] < 1  # the largest error over its bound
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa3verify.public import *  # noqa: F403

__version__ = "0.2.0"
__all__ = [  # noqa: F405
    "AttentionProblem",
    "Candidate",
    "Case",
    "Config",
    "KernelModel",
    "Operands",
    "Policy",
    "QuantScheme",
    "Recipe",
    "Result",
    "default_config",
    "forward_bound",
    "judge",
    "kernel",
    "load_activations",
    "prepare",
    "replay",
    "simulate",
    "truth",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'fa3verify' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module("fa3verify.public"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
