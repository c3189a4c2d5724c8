"""The host side of a backward launch with the GPU's part replaced: what kernels are given, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

import torch

from fa3_kernels.gluon import launch_backward, run
from fa3_kernels.gluon.arguments import Packed
from fa3_kernels.gluon.launch_backward import backward
from fa3_kernels.plan.backward import backward_plan
from fa3_kernels.plan.call import Block, Pointer, View
from fa3_kernels.plan.choose import without_lengths
from fa3_kernels.plan.request import Semantics
from fa3_reference.problem import AttentionProblem
from tests.kernels.no_gpu import no_gpu

pytestmark = pytest.mark.optional

DENSE = AttentionProblem(2, 4, 2, 300, 200, 64, head_dim_v=48, causal=True)
PACKED = AttentionProblem.varlen((100, 0, 30), (50, 7, 60), nheads=4, nheads_kv=2, head_dim=128)


@pytest.fixture
def started():
    with no_gpu() as found:
        yield found


@pytest.fixture
def workspaces(monkeypatch) -> list[tuple[int, int]]:
    """First and last address of the workspace of every launch."""
    found, start = [], run.PlanOnGpu.run

    def record(self: run.PlanOnGpu, calls: Any, operands: run.Operands, *rest: Any) -> None:
        storage = operands[4][1].untyped_storage()  # behind q, k, v and dout
        found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        start(self, calls, operands, *rest)

    monkeypatch.setattr(run.PlanOnGpu, "run", record)
    return found


def tensors(problem: AttentionProblem) -> dict[str, Any]:
    """What a backward takes, in its order."""
    shapes = {"dout": problem.out_shape, "q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape}
    given = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    return given | {"out": torch.zeros_like(given["dout"]), "lse": torch.zeros(problem.lse_shape)}


def packed_of(problem: AttentionProblem) -> Packed | None:
    if not problem.is_varlen:
        return None
    starts = (torch.from_numpy(x) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    return Packed(*starts, problem.seqlen_q, problem.seqlen_k)


def run_backward(problem: AttentionProblem, given: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    return backward(*given.values(), Semantics.of(problem), packed=packed_of(problem), **options)


def assert_given(
    started, workspace_at: tuple[int, int], problem: AttentionProblem, known: dict[str, Any], is_deterministic: bool
) -> None:
    """What kernels got are the calls of a plan made for this launch alone, and places in a workspace that do not
    overlap."""
    plan = backward_plan(without_lengths(problem), 132, is_deterministic=is_deterministic)
    rows_q = problem.q_shape[0] if problem.is_varlen else 0
    calls = plan.calls(rows_q)
    assert [(x.kernel, x.grid) for x in started] == [(x.kernel, (*x.grid, 1, 1)[:3]) for x in calls]
    rows, channels = plan.sums_shape(plan.numbers(rows_q)["num_blocks"])
    workspace = {"dq_sums": ((rows, channels), (channels, 1)), "stats": ((2 * rows,), (1,))}
    at = {name: x.data_ptr() for name, x in known.items()}
    for call, got_of_call in zip(calls, started, strict=True):
        rest = iter(got_of_call.arguments)
        for wanted in call.arguments:
            got = next(rest)
            if isinstance(wanted, View | Block):
                x = known.get(wanted.name)
                of_tensor = workspace[wanted.name] if x is None else (tuple(x.shape), x.stride())
                shape, strides = wanted.of(*of_tensor)
                assert (got.shape, got.strides) == (shape, strides), wanted
                assert at.setdefault(wanted.name, got.address) == got.address
                assert [next(rest) for _ in (*shape, *strides)] == [*shape, *strides]
            elif isinstance(wanted, Pointer):
                assert at.setdefault(wanted.name, got) == got, wanted
            else:
                assert got == wanted
        assert not list(rest)
    spans = {"dq_sums": 4 * rows * channels, "stats": 8 * rows, "turns": 4 * (rows // plan.config.tile_m)}
    first, end = workspace_at
    ordered = [(first, first), *sorted((at[name], at[name] + size) for name, size in spans.items()), (end, end)]
    assert all(a[1] <= b[0] for a, b in pairwise(ordered))
    assert not any((address - first) % 16 for address, _ in ordered[:-1])


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=["dense", "packed"])
def test_kernels_are_given_their_own_numbers_and_tensors(started, workspaces, problem, is_deterministic):
    for _ in range(2):  # planned, and looked up
        started.clear()
        given = tensors(problem)
        dq, dk, dv = run_backward(problem, given, is_deterministic=is_deterministic)
        assert [tuple(x.shape) for x in (dq, dk, dv)] == [problem.q_shape, problem.k_shape, problem.v_shape]
        assert_given(started, workspaces[-1], problem, given | {"dq": dq, "dk": dk, "dv": dv}, is_deterministic)
    assert len(launch_backward._launches) == 1


def test_packed_sequences_of_other_lengths_share_a_plan(started, workspaces):
    for lengths in ((100, 30), (97, 2), (99, 98)):
        problem = AttentionProblem.varlen(lengths, lengths, nheads=4, nheads_kv=2, head_dim=128)
        started.clear()
        given = tensors(problem)
        dq, dk, dv = run_backward(problem, given)
        assert_given(started, workspaces[-1], problem, given | {"dq": dq, "dk": dk, "dv": dv}, False)
    assert len(launch_backward._launches) == 1


def test_a_gradient_may_lie_anywhere_and_an_operand_only_at_a_multiple_of_16_bytes(started):
    given = tensors(DENSE)
    shape, count = given["dout"].shape, given["dout"].numel()
    skewed = torch.zeros(count + 1, dtype=torch.float16)[1:].view(shape)
    for dout in (skewed, torch.zeros((), dtype=torch.float16).expand(shape)):
        started.clear()
        run_backward(DENSE, given | {"dout": dout})
        start, main, _ = started
        seen = main.descriptors[3]
        assert seen.address == start.arguments[1]
        assert seen.address % 16 == 0
        assert seen.strides == (300 * 4 * 48, 48, 4 * 48, 1)
    q = torch.zeros(given["q"].numel() + 1, dtype=torch.float16)[1:].view(given["q"].shape)
    with pytest.raises(ValueError, match="addresses of q, k and v must be multiples of 16 bytes"):
        run_backward(DENSE, given | {"q": q})


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (3, -1)}, {"window": (-1, 3)}])
@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=["dense", "packed"])
def test_no_keys_start_no_kernel_and_give_zero(started, problem, mask, is_deterministic):
    lengths = {"seqlens_k": (0,) * problem.batch} if problem.is_varlen else {}
    fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    empty = AttentionProblem(**{**fields, "causal": False, "seqlen_k": 0, **lengths, **mask})
    found = run_backward(empty, tensors(empty), is_deterministic=is_deterministic)
    assert not started
    assert [tuple(x.shape) for x in found] == [empty.q_shape, empty.k_shape, empty.v_shape]
    assert not any(x.any() for x in found)


WRONG = (
    ({"dout": torch.zeros(2, 300, 4, 64, dtype=torch.float16)}, r"dout must be float16 \(2, 300, 4, 48\)"),
    ({"out": torch.zeros(2, 300, 4, 48)}, r"out must be float16 .*, got torch.float32"),
    ({"lse": torch.zeros(2, 300, 4)}, r"lse must be float32 \(2, 4, 300\)"),
    ({"lse": torch.zeros(2, 4, 300, dtype=torch.float64)}, "lse must be float32 .* got torch.float64"),
    ({"k": torch.zeros(2, 200, 2, 68, dtype=torch.float16)[..., :64]}, "strides of k must be multiples of 16 bytes"),
    ({"v": torch.zeros(2, 199, 2, 48, dtype=torch.float16)}, "one shape but for head_dim"),
    ({"q": torch.zeros(2, 300, 4, 60, dtype=torch.float16)}, "k and v must fit q"),
)


@pytest.mark.parametrize(("changes", "message"), WRONG)
@pytest.mark.parametrize("is_known", [False, True])
def test_what_the_kernels_do_not_take_is_refused_in_one_line(started, changes, message, is_known):
    given = tensors(DENSE)
    if is_known:
        run_backward(DENSE, given)
        started.clear()
    with pytest.raises(ValueError, match=message) as caught:
        run_backward(DENSE, given | changes)
    assert "\n" not in str(caught.value)
    assert not started


def test_head_dims_that_tma_does_not_read_are_refused(started):
    odd = AttentionProblem(1, 1, 1, 8, 8, 60)
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8 \(TMA\), got 60"):
        run_backward(odd, tensors(odd))


def test_starts_and_packed_rows_are_checked_whether_or_not_the_launch_is_known(started):
    given, packed = tensors(PACKED), packed_of(PACKED)
    assert packed
    run_backward(PACKED, given)
    for wrong, message in (
        (packed._replace(cu_seqlens_q=packed.cu_seqlens_q.long()), "cu_seqlens_q must be int32"),
        (packed._replace(cu_seqlens_k=packed.cu_seqlens_k[:2]), "must have one length, got 4 and 2"),
    ):
        with pytest.raises(ValueError, match=message):
            backward(*given.values(), Semantics.of(PACKED), packed=wrong)
    for name, x, message in (
        ("v", given["v"][:-1], "one shape but for head_dim"),
        ("dout", given["dout"][:-1], r"dout must be float16 \(130, 4, 128\)"),
        ("out", given["out"][:-1], r"out must be float16 \(130, 4, 128\)"),
        ("lse", given["lse"][:, :-1], r"lse must be float32 \(4, 130\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run_backward(PACKED, given | {name: x})
    with pytest.raises(ValueError, match=r"dlse must be float32 \(4, 130\)"):
        run_backward(PACKED, given, dlse=given["lse"][:, :-1])


def test_grids_beyond_cudas_limit_are_refused(started):
    sequences = AttentionProblem(65536, 1, 1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"at most 65535 sequences and .* got 65536 and 1"):
        run_backward(sequences, tensors(sequences))


def test_launches_are_kept_up_to_a_number_and_those_of_a_graph_for_good(started, monkeypatch):
    monkeypatch.setattr(run, "MAX_KEPT", 2)
    monkeypatch.setattr(run, "_captured", [])
    for seqlen in (10, 20, 30):
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda seqlen=seqlen: seqlen == 20)
        problem = AttentionProblem(1, 1, 1, seqlen, seqlen, 64)
        run_backward(problem, tensors(problem))
        assert len(launch_backward._launches) <= 2
    assert len(run._captured) == 1


def test_a_plan_that_is_not_on_the_gpu_cannot_be_captured(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run it once before"):
        run_backward(DENSE, tensors(DENSE))


@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=["dense", "packed"])
def test_the_gradient_of_lse_is_taken_from_every_rows_dots_between_the_first_two_kernels(started, monkeypatch, problem):
    plan = backward_plan(without_lengths(problem), 132)
    num_blocks = plan.numbers(problem.q_shape[0] if problem.is_varlen else 0)["num_blocks"]
    seen, subtract = [], launch_backward.subtract_from_dots

    def between(stats: Any, dlse: Any, *rest: Any) -> None:
        stats.fill_(1000.0)
        subtract(stats, dlse, *rest)
        seen.append(([x.kernel for x in started], stats.clone()))

    monkeypatch.setattr(launch_backward, "subtract_from_dots", between)
    given = tensors(problem)
    dlse = 1 + torch.arange(given["lse"].numel(), dtype=torch.float32).reshape(problem.lse_shape)
    given["lse"].view(-1)[3] = -torch.inf  # a row without a key, whose gradient is not read
    run_backward(problem, given, dlse=torch.where(given["lse"].isneginf(), torch.nan, dlse))
    assert [x.kernel for x in started] == ["backward_start", "backward", "backward_finish"]
    ((before, stats),) = seen
    assert before == ["backward_start"]
    tile_m = plan.config.tile_m
    want = torch.full((problem.nheads, num_blocks, 2, tile_m), 1000.0)
    for seq in problem.sequences():
        first = seq.q_start // tile_m + seq.index if problem.is_varlen else seq.index * -(-problem.seqlen_q // tile_m)
        of_rows = torch.from_numpy(problem.rows_lse(dlse.numpy(), seq))
        for row in range(seq.seqlen_q):
            want[:, first + row // tile_m, 1, row % tile_m] -= of_rows[:, row]
    want.view(-1)[want.view(-1) == 1000.0 - 4] = 1000.0
    assert torch.equal(stats.view_as(want), want)


def test_rows_of_no_packed_sequence_and_beyond_the_longest_take_no_gradient_of_lse(started):
    """Memory of them may hold anything, and the blocks that they would be in belong to nobody."""
    problem = AttentionProblem.varlen((100, 30), (50, 7), nheads=1, nheads_kv=1, head_dim=64)
    plan = backward_plan(without_lengths(problem), 132)
    for total, longest in ((140, 100), (130, 60), (400, 100)):
        num_blocks = plan.numbers(total)["num_blocks"]
        stats = torch.zeros(2 * num_blocks * plan.config.tile_m)
        dlse = torch.full((1, total), torch.nan)
        rows = [*range(min(100, longest)), *range(100, 130)]
        dlse[:, rows] = 1.0
        packed = Packed(torch.tensor([0, 100, 130], dtype=torch.int32), torch.tensor([0, 50, 57]), longest, 50)
        launch_backward.subtract_from_dots(stats, dlse, plan, num_blocks, packed)
        assert torch.isfinite(stats).all()
        assert int((stats == -1).sum()) == len(rows)
