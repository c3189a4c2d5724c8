"""fa3verify: numerics verification and schedule simulation for FlashAttention-3 on NVIDIA Hopper.

Everything a user needs is a name of this module, imported when it is first asked for: ``import fa3verify`` costs
nothing, and only GPU kernels import torch.

>>> import fa3verify
>>> problem = fa3verify.AttentionProblem(1, nheads=2, nheads_kv=1, seqlen_q=64, seqlen_k=64, head_dim=64, causal=True)
>>> judged = fa3verify.judge("twin.fp16", problem, fa3verify.Recipe("peaky", {"gain": 4}))
>>> judged.measures["ratio_max"] < 1  # the largest error over its bound
True
"""

from typing import TYPE_CHECKING

from fa3verify.version import __version__ as __version__

__all__ = [
    "Activation",
    "Attention",
    "AttentionProblem",
    "BackwardModel",
    "BackwardSchedule",
    "Cache",
    "Case",
    "CheckedCall",
    "Config",
    "Descale",
    "Edit",
    "ErrorBound",
    "Estimate",
    "Identity",
    "Judgement",
    "Kernel",
    "KernelError",
    "KernelModel",
    "KernelRun",
    "Machine",
    "Operands",
    "Policy",
    "QuantScheme",
    "Quantises",
    "Quantized",
    "Ranked",
    "Recipe",
    "Replayed",
    "Result",
    "Run",
    "SoftmaxOrder",
    "Tolerance",
    "array_kernel",
    "assert_attention",
    "check",
    "default_config",
    "find_kernel",
    "forward_bound",
    "judge",
    "kernel",
    "load_activations",
    "prepare",
    "replay",
    "simulate",
    "tolerance",
    "torch_kernel",
    "truth",
    "tune",
    "verify",
    "watch",
]

if TYPE_CHECKING:
    from fa3_kernels.plan.config import Config, default_config
    from fa3_reference.attention import Attention, attention as truth
    from fa3_reference.bounds.forward import ErrorBound, forward_bound
    from fa3_reference.bounds.model import BackwardModel, KernelModel
    from fa3_reference.bounds.order import SoftmaxOrder
    from fa3_reference.bounds.quantises import Quantises
    from fa3_reference.cache import Cache
    from fa3_reference.problem import AttentionProblem, Descale, Operands
    from fa3_reference.quantize import Quantized, QuantScheme, prepare
    from fa3_simulator.backward_schedule import BackwardSchedule
    from fa3_simulator.machine import Machine
    from fa3_simulator.run import Estimate
    from fa3_simulator.tune import Ranked
    from fa3verify.campaign.run import KernelRun, Run
    from fa3verify.cases.case import Case
    from fa3verify.checking.check import assert_attention, check
    from fa3verify.checking.checked import CheckedCall
    from fa3verify.checking.tolerance import Tolerance, tolerance
    from fa3verify.commands.replay import Replayed
    from fa3verify.inputs.activations import Activation
    from fa3verify.inputs.captures import load as load_activations
    from fa3verify.inputs.edits import Edit
    from fa3verify.inputs.recipe import Recipe
    from fa3verify.judging.judgement import Judgement
    from fa3verify.kernels.calls import KernelError
    from fa3verify.kernels.functions import array_kernel, torch_kernel
    from fa3verify.kernels.policy import Policy
    from fa3verify.kernels.record import Identity, Kernel
    from fa3verify.known.registry import find as find_kernel
    from fa3verify.operations.forward import Result
    from fa3verify.public import judge, kernel, replay, simulate, tune, verify
    from fa3verify.sanitizer import watch
else:
    from fa3_reference.lazy import exporter

    __getattr__, __dir__ = exporter(
        __name__,
        {
            "Activation": "fa3verify.inputs.activations",
            "Attention": "fa3_reference.attention",
            "AttentionProblem": "fa3_reference.problem",
            "BackwardModel": "fa3_reference.bounds.model",
            "BackwardSchedule": "fa3_simulator.backward_schedule",
            "Cache": "fa3_reference.cache",
            "Kernel": "fa3verify.kernels.record",
            "KernelError": "fa3verify.kernels.calls",
            "Case": "fa3verify.cases.case",
            "CheckedCall": "fa3verify.checking.checked",
            "Tolerance": "fa3verify.checking.tolerance",
            "tolerance": "fa3verify.checking.tolerance",
            "Config": "fa3_kernels.plan.config",
            "Descale": "fa3_reference.problem",
            "Edit": "fa3verify.inputs.edits",
            "ErrorBound": "fa3_reference.bounds.forward",
            "Estimate": "fa3_simulator.run",
            "Identity": "fa3verify.kernels.record",
            "Judgement": "fa3verify.judging.judgement",
            "KernelModel": "fa3_reference.bounds.model",
            "KernelRun": "fa3verify.campaign.run",
            "Machine": "fa3_simulator.machine",
            "Operands": "fa3_reference.problem",
            "Policy": "fa3verify.kernels.policy",
            "QuantScheme": "fa3_reference.quantize",
            "Quantises": "fa3_reference.bounds.quantises",
            "Quantized": "fa3_reference.quantize",
            "Ranked": "fa3_simulator.tune",
            "Recipe": "fa3verify.inputs.recipe",
            "Replayed": "fa3verify.commands.replay",
            "Result": "fa3verify.operations.forward",
            "Run": "fa3verify.campaign.run",
            "SoftmaxOrder": "fa3_reference.bounds.order",
            "array_kernel": "fa3verify.kernels.functions",
            "assert_attention": "fa3verify.checking.check",
            "check": "fa3verify.checking.check",
            "default_config": "fa3_kernels.plan.config",
            "find_kernel": "fa3verify.known.registry:find",
            "forward_bound": "fa3_reference.bounds.forward",
            "judge": "fa3verify.public",
            "kernel": "fa3verify.public",
            "load_activations": "fa3verify.inputs.captures:load",
            "prepare": "fa3_reference.quantize",
            "replay": "fa3verify.public",
            "simulate": "fa3verify.public",
            "torch_kernel": "fa3verify.kernels.functions",
            "truth": "fa3_reference.attention:attention",
            "tune": "fa3verify.public",
            "verify": "fa3verify.public",
            "watch": "fa3verify.sanitizer",
        },
    )
