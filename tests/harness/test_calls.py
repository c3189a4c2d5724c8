"""Calls: a kernel can reach neither its operands, its problem nor the truth, and returns what it declares."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge
from fa3verify.kernels import calls
from fa3verify.kernels.record import Functions, Kernel
from fa3verify.known.registry import find
from fa3verify.operations import FEATURES
from fa3verify.operations.forward import Forward, Result, order_of_family
from fa3verify.properties import find_law, run_law
from tests.harness.third_party import run as ideal

PROBLEM = AttentionProblem(1, 2, 1, 5, 9, 64)
CASE = Case("k", PROBLEM, Recipe("normal"))


def kernel(run, dtype="fp16") -> Kernel:
    return Kernel("k", dtype, Functions(run, default_config), FEATURES)


def overwriting(problem, operands, config):
    result = ideal(problem, operands, config)
    operands.k.setflags(write=True)
    operands.k[...] = 0
    return result


def overwriting_a_descale(problem, operands, config):
    result = ideal(problem, operands, config)
    operands.v_descale.values.setflags(write=True)
    operands.v_descale.values[...] *= 2
    return result


def writing_in_place(problem, operands, config):
    operands.q[...] = 0
    return ideal(problem, operands, config)


def in_float64(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return Result(out.astype(np.float64), lse)


def lse_in_float64(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return Result(out, lse.astype(np.float64))


def as_a_list(problem, operands, config):
    return {"out": ideal(problem, operands, config).out.tolist()}


def leaving(problem, operands, config):
    sys.exit(0)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def mute(problem, operands, config):
    raise Mute


BROKEN = (
    (overwriting, "changed its operand k"),
    (writing_in_place, "assignment destination is read-only"),
    (in_float64, "returned out of dtype float64, expected float16"),
    (lse_in_float64, "returned lse of dtype float64, expected float32"),
    (as_a_list, "returned out as list, expected a numpy array"),
    (leaving, "SystemExit: 0"),
    (mute, "its __str__ raised RuntimeError"),
)


@pytest.mark.parametrize(("run", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_kernel_may_not_do_is_named_in_a_judgement_and_in_a_law(run, words):
    with pytest.raises(calls.KernelError, match=words):
        judge(kernel(run), CASE)
    found = run_law(find_law("error_within_bound"), kernel(run), max_examples=3, seed=0)
    assert words in found.violation.message


def test_a_changed_descale_is_found():
    with pytest.raises(calls.KernelError, match="changed its operand v_descale"):
        judge(kernel(overwriting_a_descale, "e4m3"), find_case("e4m3"))


def find_case(dtype: str) -> Case:
    from fa3_reference.quantize import QuantScheme

    return Case("k", replace(PROBLEM, dtype=dtype), Recipe("normal"), QuantScheme())


def test_a_kernel_that_copies_what_it_may_not_write_is_sound():
    def careful(problem, operands, config):
        assert not operands.q.flags.writeable
        q = operands.q.copy()
        q[...] = 0
        strided = np.repeat(ideal(problem, operands, config).out, 2, axis=-1)[..., ::2]
        assert not strided.flags.c_contiguous
        return Result(strided, None)

    assert judge(kernel(careful), CASE).measures["ratio_max"] < 1


def test_a_kernel_that_changes_its_problem_and_configuration_changes_only_copies():
    def cheating(problem, operands, config):
        result = ideal(problem, operands, config)
        object.__setattr__(problem, "causal", True)
        object.__setattr__(config, "out_dtype", "bf16")
        return result

    config = default_config(PROBLEM)
    out = calls.run(kernel(cheating), PROBLEM, CASE.operands(), config)["out"]
    assert (PROBLEM.causal, config.out_dtype, out.dtype) == (False, "fp16", np.float16)


@pytest.mark.parametrize("refusal", [ValueError, NotImplementedError])
def test_what_a_kernel_does_not_support_is_refused_and_anything_else_is_a_mistake(refusal):
    def refusing(problem, operands, config):
        raise refusal("no windows")

    def broken(problem, operands, config):
        raise RuntimeError("no windows")

    with pytest.raises(calls.Refused, match="no windows"):
        calls.run(kernel(refusing), PROBLEM, CASE.operands(), default_config(PROBLEM))
    with pytest.raises(calls.KernelError, match="no windows") as raised:
        calls.run(kernel(broken), PROBLEM, CASE.operands(), default_config(PROBLEM))
    assert not isinstance(raised.value, calls.Refused)


def of_triton() -> type[Exception]:
    """What Triton's interpreter raises, without Triton."""
    return type("InterpreterError", (Exception,), {"__module__": "triton.runtime.errors"})


@pytest.mark.parametrize(
    ("kinds", "cause", "is_refused"),
    [
        ([of_triton()], NotImplementedError, True),
        ([of_triton(), of_triton()], NotImplementedError, True),  # in a function that the kernel calls
        ([of_triton()], IndexError, False),
        ([RuntimeError], NotImplementedError, False),
        ([RuntimeError, of_triton()], NotImplementedError, False),
        ([type("InterpreterError", (Exception,), {})], NotImplementedError, False),
    ],
)
def test_of_errors_with_a_cause_those_of_tritons_interpreter_alone_are_refusals(kinds, cause, is_refused):
    def raising(problem, operands, config):
        error = cause("atomics")
        for kind in reversed(kinds):
            outer = kind(repr(error))
            outer.__cause__ = error
            error = outer
        raise error

    with pytest.raises(calls.KernelError, match="atomics") as raised:
        calls.run(kernel(raising), PROBLEM, CASE.operands(), default_config(PROBLEM))
    assert isinstance(raised.value, calls.Refused) is is_refused


def test_outputs_are_no_memory_of_the_kernel():
    buffer = np.zeros(PROBLEM.out_shape, np.float16)

    def reusing(problem, operands, config):
        buffer[...] += 1
        return {"out": buffer}

    first, second = (calls.run(kernel(reusing), PROBLEM, CASE.operands(), default_config(PROBLEM)) for _ in "12")
    assert (first["out"] != second["out"]).all()


def test_truth_and_bound_of_a_forward_are_made_before_the_kernel_runs(monkeypatch):
    order = []

    def noted(name, function):
        return lambda *given: order.append(name) or function(*given)

    monkeypatch.setattr(Forward, "truth", noted("truth", Forward.truth))
    monkeypatch.setattr(Forward, "bound", noted("bound", Forward.bound))
    sound = kernel(noted("run", ideal))
    stated = replace(sound, order=order_of_family)
    judge(stated, CASE)
    assert order == ["truth", "truth", "bound", "run"]
    order.clear()
    judge(sound, CASE)
    assert order == ["truth", "truth", "bound", "bound", "bound", "run"]  # a bound for each hypothesis
    for judged in (stated, sound):
        order.clear()
        run_law(find_law("error_within_bound"), judged, max_examples=1, seed=0)
        assert order[:3] == ["truth", "bound", "run"]
        assert order.count("run") == 1


def test_a_quantiser_is_judged_by_what_it_chose_on_operands_it_never_had():
    quantiser = find("twin.quantize")
    problem = replace(PROBLEM, dtype="e4m3")

    def overwriting(problem, operands, config):
        result = quantiser.code.run(problem, operands, config)
        operands.q.setflags(write=True)
        operands.q[...] = 0
        return result

    case = Case("k", problem, Recipe("normal"), operation="quantize")
    with pytest.raises(calls.KernelError, match="changed its operand q"):
        judge(replace(quantiser.altered(run=overwriting), name="k"), case)
    assert operations.find("quantize").judges_choices


def test_a_process_that_a_kernel_forks_ends_with_the_call(tmp_path):
    def forking(problem, operands, config):
        os.fork()
        return ideal(problem, operands, config)

    calls.run(kernel(forking), PROBLEM, CASE.operands(), default_config(PROBLEM))
    with (tmp_path / "once").open("a") as file:
        file.write(f"{os.getpid()}\n")
    _pid, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 1
    assert (tmp_path / "once").read_text() == f"{os.getpid()}\n"
