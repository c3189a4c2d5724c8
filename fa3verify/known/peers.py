"""The table of other people's GPU kernels, which verify judges, bench times beside ours, and record records.

``--peers DIR`` or the variable FA3VERIFY_PEERS names a folder with the binaries that come with no package: a file in it
may be packed, as ``NAME.so.xz``, and is unpacked beside itself on first use.

The table says what is known of a library. :mod:`fa3verify.known.peer_kernels` makes kernels of its rows, and
:mod:`fa3verify.known.launches` runs them. No library is imported before a kernel runs, torch included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fa3_kernels.plan.backward import BackwardConfig, backward_config
from fa3_kernels.plan.config import Config, default_config
from fa3_reference.bounds import KernelModel, SoftmaxOrder
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.rules import require
from fa3verify import operations
from fa3verify.kernels.functions import Facts
from fa3verify.kernels.policy import Policy
from fa3verify.known.cpu_kernels import all_fp32
from fa3verify.known.libraries import why_missing, why_not_importable
from fa3verify.operations.backward import GradientConfig, model_of
from fa3verify.operations.forward import order_of_family

SIXTEEN: tuple[Dtype, ...] = ("fp16", "bf16")
_TOP_LEFT = Policy(causal="top_left")
FLASH4_RUNTIME = "flash4/libcute_dsl_runtime.so"
_RUNNING = SoftmaxOrder("unscaled", "always", "any", "running", "any", "rounded", "float32", "apart")


def _any_order(config: Config) -> KernelModel:
    """Return the model of a GPU kernel of unknown order: products are added in the tensor core or in binary32."""
    return KernelModel.any_order(config.dtype, config.out_dtype, accumulator="either")


def _blocks(config: Config) -> KernelModel:
    """Return the model of a kernel that goes over key blocks in any order.

    By its source it rounds the scaled scores, and then their product with log2(e). Its sums are those of the tensor
    core or of binary32, as neither instruction nor tile is known.
    """
    return replace(_any_order(config), order=_RUNNING)


def _added_in_16_bits(config: GradientConfig) -> BackwardModel:
    """Return the model of gradients under torch, which adds dK and dV of a group's heads in 16 bits."""
    return replace(BackwardModel.any_order(config.dtype, accumulator="either"), parts=config.dtype)


def flash4_refuses(problem: AttentionProblem) -> str:
    """Return the rule by which no kernel of FlashAttention-4 was compiled for a problem; empty where one was.

    >>> flash4_refuses(AttentionProblem(1, 2, 2, 64, 64, 96))
    'compiled for head_dim 64, 128 and 256, got 96 and 96'
    """
    p = problem
    if p.head_dim not in (64, 128, 256) or p.head_dim_v != p.head_dim:
        return f"compiled for head_dim 64, 128 and 256, got {p.head_dim} and {p.head_dim_v}"
    if p.is_varlen or p.softcap or p.window != (-1, -1) or p.group > 1 or p.dtype not in SIXTEEN:
        return "compiled for batches of one length in fp16 and bf16, without windows, softcap and grouped heads"
    return ""


def _sglang_refuses(problem: AttentionProblem) -> str:
    """Return the rule by which the operator refuses to append keys for more queries than there are keys; else empty.

    The operator really compares the queries with the places of the cache, of which there may be more than keys.
    """
    q, k = problem.seqlen_q, problem.seqlen_k
    is_refused = problem.cache is not None and problem.cache.new and q > k
    return f"keys are appended in calls of no more queries than keys, got {q} and {k}" if is_refused else ""


def _flex_refuses(problem: AttentionProblem) -> str:
    """Return the rule by which torch 2.11 can compile no kernel for a problem; empty where it can.

    The rules are from its source (and pull request 185349 of pytorch).

    A head has at least 16 channels. Calls of fewer than 128 queries pack a group of heads, if their number is a power
    of two, into one tile; where a mask is given, that tile must fit its blocks of 128 queries.
    """
    if min(problem.head_dim, problem.head_dim_v) < 16:
        return f"compiled for heads of at least 16 channels, got {problem.head_dim} and {problem.head_dim_v}"
    queries = problem.seqlen_q
    group = problem.group
    is_packed = queries < 128 and group & (group - 1) == 0
    rule = (
        f"with a causal mask a group's heads and fewer than 128 queries must be at most 128 rows, got {queries * group}"
    )
    return rule if problem.causal and is_packed and queries * group > 128 else ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of the table: one library's kernel, forward and maybe backward.

    Parameters
    ----------
    about : str
    module : str
        The module of :mod:`fa3verify.known` that calls it, as :mod:`fa3verify.known.launches` says.
    version : str
        Package and version; empty for a kernel that comes with torch.
    dtypes : tuple of str
    features : tuple of str
        Features of :class:`fa3verify.kernels.record.Kernel`.
    family : str
        Key of :data:`fa3_kernels.plan.families.FAMILIES`: the twin of this family has its bits and its order. Empty
        where no bits are known.
    choices : tuple of str
        Fields of a configuration that a caller of the library chooses.
    order : callable
        The order of operations without a family, as :attr:`fa3verify.kernels.record.Kernel.order`.
    gradients : callable, optional
        The order of its backward, :func:`fa3verify.operations.backward.model_of` where its family's is known; without
        it the backward is neither judged nor timed.
    refuses : callable
        Returns a rule for a problem that it refuses although its family takes it, else an empty text.
    binary, package : str
        File in the peers' folder and package, without which it cannot run.
    facts : Facts
        What its kernel declares, without a family; what a family declares stands in
        :data:`fa3verify.kernels.twins.DECLARED`, for its twin as well.
    serves : bool
        Whether it is called over a cache, with the tensors of :func:`fa3verify.known.launches.served`.
    is_timed : bool
        Whether bench times it, as a rival; others are only a yardstick of accuracy.
    """

    about: str
    module: str
    version: str = ""
    dtypes: tuple[Dtype, ...] = SIXTEEN
    features: tuple[str, ...] = ("causal", "gqa")
    family: str = ""
    choices: tuple[str, ...] = ()
    order: Callable[[Config], KernelModel] = _any_order
    gradients: Callable[[Any], BackwardModel] | None = None
    refuses: Callable[[AttentionProblem], str] = lambda problem: ""
    binary: str = ""
    package: str = "torch"
    facts: Facts = field(default_factory=Facts)
    serves: bool = False
    is_timed: bool = True

    def configure(self, problem: AttentionProblem, **changes: Any) -> Config:
        """Return the configuration of a launch; without a family only its formats are true.

        ``changes`` are fields of it. ValueError for a problem that the library, or its twin, does not take.
        """
        self._check(problem)
        if not self.family:
            return default_config(replace(problem, term=None))  # of which our launches have none
        return operations.find(operations.FORWARD).configure(problem, family=self.family, **changes)

    def configure_backward(self, problem: AttentionProblem) -> BackwardConfig | GradientConfig:
        """Return the backward's configuration: that of the family if its order is known, else only the formats.

        ValueError as for a forward, and for two head dims.
        """
        self._check(problem, takes_two_head_dims=False)
        is_known = self.gradients is model_of
        return backward_config(problem, family=self.family) if is_known else GradientConfig(problem.dtype)

    def _check(self, problem: AttentionProblem, takes_two_head_dims: bool = True) -> None:
        """Raise ValueError for a head_dim that no library takes, and for what this one refuses."""
        step = 16 if problem.dtype == "e4m3" else 8
        dims = (problem.head_dim, problem.head_dim_v)
        is_taken = not any(d % step for d in dims) and (takes_two_head_dims or dims[0] == dims[1])
        require(is_taken, f"head_dim must be a multiple of {step}, got {dims[0]} and {dims[1]}")
        rule = self.refuses(problem)
        require(not rule, rule)

    def model(self, config: Config) -> KernelModel:
        """Return what the error bound assumes of a launch."""
        return order_of_family(config) if self.family else self.order(config)

    def missing(self) -> str | None:
        """Return why a file or a package is missing; None where all are there. Whether there is a GPU is not asked."""
        if self.binary and (reason := why_missing(self.binary)):
            return reason
        return why_not_importable(self.package)


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
        gradients=model_of,
        binary="libdew_flash_attn3.so",
    ),
    "vllm": Peer(
        "FlashAttention-3 as vLLM builds it",
        "flash3_serving",
        "vllm 0.33.0",
        ("bf16", "e4m3"),
        family="vllm",
        choices=("num_splits",),
        binary="vllm.so",
        serves=True,
    ),
    "sglang": Peer(
        "FlashAttention-3 as SGLang builds it",
        "flash3_serving",
        "sglang-kernel 0.4.5",
        ("bf16", "e4m3"),
        family="sglang",
        choices=("num_splits",),
        refuses=_sglang_refuses,
        binary="sgl.so",
        serves=True,
    ),
    "flash4": Peer(
        "FlashAttention-4 in the CuTe DSL, compiled beforehand",
        "flash4",
        "flash-attn 4.0.0b36",
        features=("causal",),
        gradients=_added_in_16_bits,
        refuses=flash4_refuses,
        binary=FLASH4_RUNTIME,
        package="tvm_ffi",
        facts={"min_seqlen": 1},
    ),
    "flash2": Peer(
        "FlashAttention-2 of torch",
        "torch_sdpa",
        features=("causal", "gqa", "varlen"),
        family="flash2",
        gradients=_added_in_16_bits,
    ),
    "flash2.vllm": Peer(
        "FlashAttention-2 as vLLM builds it, with ALiBi",
        "flash3_serving",
        "vllm 0.33.0",
        features=("causal", "gqa", "varlen", "alibi"),
        binary="vllm_fa2.so",
        facts={"policy": Policy(empty_lse="+inf")},
        serves=True,
        is_timed=False,
    ),
    "cudnn": Peer("cuDNN's attention by torch", "torch_sdpa", family="cudnn", gradients=_added_in_16_bits),
    "cuda.efficient": Peer(
        "torch SDPA, backend EFFICIENT, on a GPU",
        "torch_sdpa",
        order=_blocks,
        facts={"min_seqlen": 1, "policy": _TOP_LEFT},
        is_timed=False,
    ),
    "cuda.math": Peer(
        "torch SDPA, backend MATH, on a GPU",
        "torch_sdpa",
        order=all_fp32,
        facts={"policy": Policy(causal="top_left", special_values="visible")},  # the mask is added to the scores
        is_timed=False,
    ),
    "cuda.flex": Peer(
        "torch's FlexAttention, compiled for a GPU",
        "torch_flex",
        order=_blocks,
        refuses=_flex_refuses,
        facts={"min_seqlen": 1},
    ),
}


BACKWARDS = ("flash3.dew", "cudnn", "flash2", "flash4")  # those with gradients, in the order in which they are listed
