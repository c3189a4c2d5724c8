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
from fa3verify.sanitizer import explain, logprobs, watch

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
    "explain",
    "find_kernel",
    "forward_bound",
    "judge",
    "kernel",
    "load_activations",
    "logprobs",
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

__version__: str
