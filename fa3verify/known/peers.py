"""The table of other people's GPU kernels: what verify judges, what bench times beside ours, what record records.

``--peers DIR`` or the variable FA3VERIFY_PEERS names a folder with the binaries that come with no package: a file in it
may be packed, as ``NAME.so.xz``, and is unpacked beside itself on first use. cuDNN's frontend is looked for as
``nvidia_cudnn_frontend*.whl``; it may be installed instead.

Nothing of a library is imported before a kernel runs, torch included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from fa3_kernels.plan.config import Config, default_config
from fa3_reference.bounds import KernelModel, SoftmaxOrder
from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify import operations
from fa3verify.kernels.policy import Policy
from fa3verify.known import flash4
from fa3verify.known.cpu_candidates import all_fp32
from fa3verify.known.libraries import folder, why_missing
from fa3verify.operations.forward import order_of_family

SIXTEEN: tuple[Dtype, ...] = ("fp16", "bf16")
_TOP_LEFT = Policy(causal="top_left")
_RUNNING = SoftmaxOrder("unscaled", "always", "any", "running", "any", "rounded", "float32", "apart")


def _any_order(config: Config) -> KernelModel:
    """Any order on the GPU that peers run on: the tensor core may add the products, or binary32."""
    return KernelModel.any_order(config.dtype, config.out_dtype, accumulator="either")


def _blocks(config: Config) -> KernelModel:
    """Key blocks in any order, each rounding the scaled scores and then the factor to log2 units, by source; sums of
    the tensor core or in binary32, as neither its instruction nor the tile is known."""
    return replace(_any_order(config), order=_RUNNING)


def _chained(config: Config) -> KernelModel:
    """The same with sums that stay in the tensor core and P of at most 256: the factor that the caller gives it, and
    that the running maximum moves it at every block, as no kernel for Hopper is known not to."""
    return replace(_blocks(config), accumulator="wgmma")


def _flex_refuses(problem: AttentionProblem) -> str:
    """Return what the compiler of torch 2.11 finds no kernel for, by source (and pull request 185349 of pytorch).

    Calls of fewer than 128 queries pack a group of heads, if their number is a power of two, into one tile; where a
    mask is given, that tile must fit its blocks of 128 queries.
    """
    queries = problem.seqlen_q
    group = problem.group
    is_packed = queries < 128 and group & (group - 1) == 0
    rule = (
        f"with a causal mask a group's heads and fewer than 128 queries must be at most 128 rows, got {queries * group}"
    )
    return rule if problem.causal and is_packed and queries * group > 128 else ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A library's forward.

    Parameters
    ----------
    about : str
    module : str
        Of :mod:`fa3verify.known`; its ``load(name)`` returns the
        :data:`fa3verify.known.launches.Forward`.
    version : str
        Empty for what comes with torch.
    dtypes : tuple of str
    features : tuple of str
        As a candidate has them.
    family : str
        Of :data:`fa3_kernels.plan.traits.FAMILIES`, whose twin has its bits and whose order it runs; empty where no
        bits are known.
    choices : tuple of str
        Fields of a configuration that a caller of the library chooses.
    order : callable
        For those without a family, as :attr:`fa3verify.kernels.record.Candidate.order`.
    refuses : callable
        For those without a family, as :attr:`fa3_kernels.plan.family.Traits.refuses`.
    binary, package : str
        File in the peers' folder, or package, without which it cannot run; ``wheel`` is the pattern of files there that
        hold the package.
    facts : tuple of (str, value)
        What its candidate declares where no family is known; what a family declares stands in
        :data:`fa3verify.kernels.twins.DECLARED`, for its twin as well.
    is_timed : bool
        Whether bench has it: a rival, not a yardstick of accuracy.
    unjudged : str
        Why verify cannot judge it, if it cannot.
    """

    about: str
    module: str
    version: str = ""
    dtypes: tuple[Dtype, ...] = SIXTEEN
    features: tuple[str, ...] = ("causal", "gqa")
    family: str = ""
    choices: tuple[str, ...] = ()
    order: Callable[[Config], KernelModel] = _any_order
    refuses: Callable[[AttentionProblem], str] = lambda problem: ""
    binary: str = ""
    package: str = "torch"
    wheel: str = ""
    facts: tuple[tuple[str, Any], ...] = ()
    is_timed: bool = True
    unjudged: str = ""

    def configure(self, problem: AttentionProblem, **changes: Any) -> Config:
        """The configuration of a launch; of a library without a family only the formats in it are true.

        ValueError for what the library, or its twin, does not take.
        """
        step = 16 if problem.dtype == "e4m3" else 8
        if problem.head_dim % step or problem.head_dim_v % step:
            raise ValueError(f"head_dim must be a multiple of {step}, got {problem.head_dim} and {problem.head_dim_v}")
        if rule := self.refuses(problem):
            raise ValueError(rule)
        if not self.family:
            return default_config(problem)
        return operations.find(operations.FORWARD).configure(problem, family=self.family, **changes)

    def model(self, config: Config) -> KernelModel:
        """Return what the error bound assumes of a launch."""
        return order_of_family(config) if self.family else self.order(config)

    def missing(self) -> str | None:
        """Return why it is not there, by files and packages alone."""
        if self.binary and (reason := why_missing(self.binary)):
            return reason
        where = folder()
        is_packed = where is not None and self.wheel and any(where.glob(self.wheel))
        if not is_packed and find_spec(self.package) is None:
            found = f" and no {self.wheel} is in the peers' folder" if self.wheel else ""
            return f"package {self.package} is not installed{found}"
        return None


PEERS: dict[str, Peer] = {
    "flash3": Peer(
        "official FlashAttention-3",
        "flash3_fwd",
        "fa3-fwd 0.0.3",
        ("bf16", "e4m3"),
        ("causal", "varlen", "gqa", "head_dim_v"),
        "flash3",
        ("num_splits", "pack_gqa"),
        binary="fa3_fwd_C.so",
    ),
    "flash3.dew": Peer(
        "official FlashAttention-3",
        "flash3_dew",
        "dew-flash-attn-cu13 0.3.6",
        features=("causal", "window", "gqa"),
        family="flash3.dew",
        binary="libdew_flash_attn3.so",
    ),
    "flash4": Peer(
        "FlashAttention-4 in the CuTe DSL, compiled beforehand",
        "flash4",
        "flash-attn 4.0.0b36",
        features=("causal",),
        refuses=flash4.refuses,
        binary=flash4.RUNTIME,
        package=flash4.PACKAGE,
        facts=(("min_seqlen", 1),),
    ),
    "flash2": Peer(
        "FlashAttention-2 of torch",
        "torch_sdpa",
        features=("causal", "gqa", "varlen"),
        family="flash2",
    ),
    "cudnn": Peer("cuDNN's attention by torch", "torch_sdpa", family="cudnn"),
    "cudnn.fp8": Peer(
        "cuDNN's attention by its frontend, e4m3 in and out",
        "cudnn_fp8",
        "nvidia-cudnn-frontend 1.18.0",
        ("e4m3",),
        order=_chained,
        package="cudnn",
        wheel="nvidia_cudnn_frontend*.whl",
        unjudged="its outputs are e4m3 with a scale of their own, of which verify has no bound; bench checks them",
    ),
    "cuda.efficient": Peer(
        "torch SDPA, backend EFFICIENT, on a GPU",
        "torch_sdpa",
        order=_blocks,
        facts=(("min_seqlen", 1), ("policy", _TOP_LEFT)),
        is_timed=False,
    ),
    "cuda.math": Peer(
        "torch SDPA, backend MATH, on a GPU",
        "torch_sdpa",
        order=all_fp32,
        facts=(("policy", _TOP_LEFT),),
        is_timed=False,
    ),
    "cuda.flex": Peer(
        "torch's FlexAttention, compiled for a GPU",
        "torch_flex",
        order=_blocks,
        refuses=_flex_refuses,
        facts=(("min_seqlen", 1),),
    ),
}


# Peers whose gradients are judged and timed.
BACKWARDS = {name: PEERS[name] for name in ("flash3.dew", "cudnn", "flash2", "flash4")}
