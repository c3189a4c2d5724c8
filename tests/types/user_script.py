"""A user's script: every public name as the documentation has it. Type checkers read it in strict mode.

It is a program as well, which the tests run. What needs a GPU or minutes is in functions that are only read.
"""

# pyright: strict
from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import fa3_kernels
import fa3_reference
import fa3_simulator
import fa3verify
from fa3_reference.bounds import Enclosure, backward_bound, forward_enclosure


@fa3verify.kernel(features=(), min_seqlen=1, policy=fa3verify.Policy(special_values="undefined"))
def mine(
    q: NDArray[np.float16], k: NDArray[np.float16], v: NDArray[np.float16], *, softmax_scale: float
) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Attention in binary32; arrays are (batch, nheads, seqlen, head_dim)."""
    scores = q.astype(np.float32) @ k.astype(np.float32).swapaxes(2, 3) * np.float32(softmax_scale)
    row_max = scores.max(axis=3, keepdims=True)
    weights = np.exp(scores - row_max)
    row_sum = weights.sum(axis=3, keepdims=True)
    out = (weights @ v.astype(np.float32) / row_sum).astype(np.float16)
    return out, (row_max + np.log(row_sum))[..., 0]


def problems() -> list[fa3verify.AttentionProblem]:
    """Return a plain problem, one with a scale of its own, and a packed one."""
    plain = fa3verify.AttentionProblem(1, nheads=1, nheads_kv=1, seqlen_q=8, seqlen_k=40, head_dim=64)
    scaled = fa3verify.AttentionProblem(1, 1, 1, 8, 40, 64, softmax_scale=None)
    packed = fa3verify.AttentionProblem.varlen((3, 5), (4, 8), nheads=2, nheads_kv=1, head_dim=64, causal=True)
    scale: float = scaled.softmax_scale
    assert scale == 0.125
    return [plain, scaled, packed]


def judged(problem: fa3verify.AttentionProblem) -> dict[str, float]:
    """Judge kernels by name, by record and by case, and return the figures."""
    kernel: fa3verify.Kernel = fa3verify.find_kernel("twin.fp16")
    recipe = fa3verify.Recipe("peaky", {"gain": 4}, seed=3, edits=(fa3verify.Edit("set", "q", value=2.0),))
    case = fa3verify.Case(kernel.name, problem, recipe)
    try:
        judgement: fa3verify.Judgement = fa3verify.judge(kernel, case)
    except fa3verify.KernelError as error:
        raise SystemExit(str(error)) from error
    seen: NDArray[np.float64] = judgement.seen["out"]
    bound: NDArray[np.float64] = judgement.bound["out"]
    distance = np.abs(judgement.outputs["out"].astype(np.float64) - seen)
    assert (distance <= bound).all()
    assert fa3verify.judge("twin.fp16", problem, recipe, tile_n=64).measures["ratio_max"] <= 1
    return judgement.measures


def bounded(problem: fa3verify.AttentionProblem) -> fa3verify.ErrorBound:
    """Hold one's own function against truth and bound by hand."""
    q, k, v = fa3verify.Recipe("normal").draw(problem)
    prepared: fa3verify.Quantized = fa3verify.prepare(problem, q, k, v)
    operands: fa3verify.Operands = prepared.operands
    exact: fa3verify.Attention = fa3verify.truth(problem, *operands.dequantized(problem))
    model = fa3verify.KernelModel.any_order("fp16", "fp16")
    bound = fa3verify.forward_bound(problem, operands, model)
    heads_first = (x.swapaxes(1, 2) for x in (operands.q, operands.k, operands.v))
    out, lse = mine(*heads_first, softmax_scale=problem.softmax_scale)
    returned = fa3verify.Result(out.swapaxes(1, 2), lse)
    assert (np.abs(returned.out.astype(np.float64) - exact.out) <= bound.out).all()
    assert returned.lse is not None
    assert (np.abs(returned.lse - exact.lse) <= bound.lse).all()
    return bound


def quantised() -> fa3verify.Descale:
    """Quantise to e4m3 and return the descale of Q."""
    problem = fa3verify.AttentionProblem(1, 1, 1, 8, 8, 64, dtype="e4m3")
    q, k, v = fa3verify.Recipe("normal").draw(problem)
    operands, lse_shift = fa3verify.prepare(problem, q, k, v, fa3verify.QuantScheme("block", block_rows_q=64))
    assert lse_shift is None
    assert operands.q_descale is not None
    values: NDArray[np.float32] = operands.q_descale.values
    assert values.shape == (1, 1, 1)
    return operands.q_descale


def enclosed(problem: fa3verify.AttentionProblem) -> Enclosure:
    """Where a stated order of operations leaves the outputs."""
    config: fa3verify.Config = fa3verify.default_config(problem, tile=(128, 64), num_splits=1)
    order = fa3verify.SoftmaxOrder(row_sum="pairs")
    model = fa3verify.KernelModel("fp16", config.out_dtype, config.tile_m, config.tile_n, order=order)
    operands, _ = fa3verify.prepare(problem, *fa3verify.Recipe("normal").draw(problem))
    return forward_enclosure(problem, operands, model)


def simulated(problem: fa3verify.AttentionProblem) -> float:
    """Simulate and rank schedules; return seconds."""
    machine: fa3verify.Machine = fa3_simulator.load_machine("h200")
    clock: fa3_simulator.Constant = machine.max_clock_mhz
    found: fa3verify.Estimate = fa3verify.simulate(problem, tile=(128, 64), machine=machine, pingpong=False)
    assert found.clock_mhz == clock.value == machine["max_clock_mhz"]
    tiles: tuple[fa3_simulator.TileBlocks, ...] = found.tiles
    assert tiles
    ranked: list[fa3verify.Ranked] = fa3verify.tune(problem, machine="h200", backward=True)
    best = ranked[0].config
    assert isinstance(best, fa3verify.BackwardSchedule)
    assert best.turns == "free"
    return found.seconds


def loaded() -> tuple[int, ...]:
    """Load activations that ship with the package."""
    activation: fa3verify.Activation = fa3verify.load_activations("smollm2_dev-prose2_n129_L08_kv2", tokens=16)
    problem, q, _, _ = activation
    assert problem.group == 3
    return q.shape


def verified(out: Path) -> str:
    """Run a campaign, and replay the worst case of it."""
    run: fa3verify.Run = fa3verify.verify("user_script:mine", out=out)
    first: fa3verify.KernelRun = run.kernels[0]
    ratio: float | None = first.worst_ratio
    lost = first.bits_lost
    assert lost is None or lost.mean <= lost.worst
    identity: fa3verify.Identity = first.introduction.identity
    replayed: fa3verify.Replayed = fa3verify.replay(out / "worst" / "case.json", kernel="twin.fp16")
    return f"{run.verdict} {ratio} {identity.version} {replayed.holds} {replayed.message} {replayed.measures}"


def given_to_functions(model: fa3verify.BackwardModel) -> tuple[fa3verify.Kernel, ...]:
    """Declare the function without a decorator."""
    from fa3verify import array_kernel, torch_kernel

    stated = array_kernel(mine, features=(), gradients="given", order=lambda config: model)
    return (*stated, *torch_kernel(mine, dtypes=("bf16",), layout="bshd"))


def main() -> None:
    """Run what is quick."""
    plain, _, packed = problems()
    assert judged(plain)["ratio_max"] <= 1
    assert bounded(plain).out.shape == plain.out_shape
    assert enclosed(plain).out.low.shape == plain.out_shape
    assert quantised().block_rows == 64
    assert simulated(fa3verify.AttentionProblem(1, 1, 1, 512, 512, 64)) > 0
    assert loaded() == (1, 16, 3, 64)
    assert packed.cu_seqlens_q.tolist() == [0, 3, 8]
    assert fa3_reference.truth is fa3verify.truth
    assert fa3_kernels.Config is fa3verify.Config
    assert callable(backward_bound)
    assert len(given_to_functions(fa3verify.BackwardModel.any_order("fp16"))) == 2


if __name__ == "__main__":
    main()
