"""The museum: 91 public reports of attention kernels and harnesses gone wrong, each planted, or said why it is not.

The numbers are those of the project's list of reports. Mistakes of values are planted in or around a twin and examined
as a kernel is; those of time are planted in the programs of the simulator and looked for by its hazard checker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from fa3_kernels.faults.table import Fault, Rewrite, faulty, load
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reports.mutation import forward_faults, gradient_faults, schedule_faults
from fa3_reports.mutation.examine import ALIAS, SEED, Examination, examine, mutant_kernel, tasks
from fa3_reports.mutation.forward_faults import Mistake, fed, posed, where
from fa3_simulator.hazards import check
from fa3_simulator.machine import load as load_machine
from fa3_simulator.program import Program
from fa3verify import operations
from fa3verify.campaign.profiles import ProfileName
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.operations.forward import Result

REPORTS = 91  # of the list
SIMULATOR = "simulator"
ORDERS = 20  # in which a program is run


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One plant of one report.

    Parameters
    ----------
    row : int
    what : str
        What is wrong.
    kernel : str
        The twin it is planted in.
    plant : Fault, Rewrite, callable
        As in :mod:`fa3_reports.mutation.forward_faults`; for gradients a callable that makes the kernel; for a
        schedule one that makes the program.
    task : str
        What finds it, tried first.
    features : frozenset of str
        What the kernel takes beyond the features of its twin.
    """

    row: int
    what: str
    kernel: str
    plant: StrEnum | Rewrite | Callable[..., Any]
    task: str = "normal"
    features: frozenset[str] = frozenset()

    @property
    def sound(self) -> Kernel:
        """Return the twin without the mistake."""
        twin = registry.find(self.kernel)
        return replace(twin, features=twin.features | self.features)


def _in_softmax(before: str, after: str) -> Rewrite:
    return Rewrite("softmax", (before, after))


def _in_forward(before: str, after: str) -> Rewrite:
    return Rewrite("forward", (before, after))


_F16 = "twin.fp16"
_FP8 = "twin.e4m3"
_EMPTY = "empty_rows_are_zero"
_BITS_OF_ONE = "each_head_alone_gives_the_same_bits"
_LSE = "np.float32(lse_empty)"

FORWARD: tuple[Exhibit, ...] = (
    Exhibit(1, "rows of V beyond the last key hold NaN", _F16, Fault("uncleared_v_tail")),
    Exhibit(
        2, "rows of K beyond the last key hold NaN and are masked by adding", _F16, forward_faults.nan_in_last_tile
    ),
    Exhibit(
        3,
        "a maximum of 0 is kept from a block that was masked altogether",
        _F16,
        _in_softmax("state.row_max = new_max", "state.row_max = base"),
        "aligned_outliers",
    ),
    Exhibit(4, "the maximum starts at -5e4", _F16, Fault("finite_sentinel"), "softmax_shift_invariance"),
    Exhibit(
        5,
        "masked scores are -1e4",
        _F16,
        _in_forward("np.where(hidden, softmax.NEG_INF, s)", "np.where(hidden, np.float32(-1e4), s)"),
        "softmax_shift_invariance",
    ),
    Exhibit(6, "rows without a key have a finite lse", _F16, _in_softmax(_LSE, "np.float32(-99.66)"), _EMPTY),
    Exhibit(7, "-inf minus -inf", _F16, Fault("unguarded_inf")),
    Exhibit(8, "rows without a key have an lse of +inf", _F16, _in_softmax(_LSE, "np.float32(np.inf)"), _EMPTY),
    Exhibit(9, "the guard of the combine is not used", _FP8, Fault("unguarded_combine"), _EMPTY),
    Exhibit(10, "only empty splits are merged without a guard", _F16, Fault("unguarded_combine"), _EMPTY),
    Exhibit(
        11,
        "a row without a key is divided by its sum of 0",
        _F16,
        _in_softmax("return np.where(empty, np.float32(0), inverse), lse", "return inverse, lse"),
        _EMPTY,
    ),
    Exhibit(13, "a scale of 0 meets -inf", _FP8, Fault("unclamped_scale"), "faint"),
    Exhibit(
        14,
        "channels beyond head_dim hold NaN",
        _F16,
        _in_forward("grown[: x.shape[0]", "grown[:, x.shape[1] :] = np.nan; grown[: x.shape[0]"),
        "error_within_bound",
    ),
    Exhibit(15, "lse in base 2", _F16, Fault("lse_base_2")),
    Exhibit(16, "lse off by a factor ln 2", _F16, _in_forward("tile_lse * unit", "tile_lse * unit * softmax.LN2")),
    Exhibit(
        17,
        "lse of splits is read in another layout",
        _F16,
        _in_forward("np.stack(lse),", "np.stack(lse, 1).reshape(len(lse), -1),"),
    ),
    Exhibit(
        18,
        "lse of packed sequences has the stride of the first",
        _F16,
        forward_faults.first_stride,
        "varlen_equals_separate_calls",
    ),
    Exhibit(
        19,
        "split partials are stored in bf16",
        _F16,
        _in_forward(
            "combine(np.stack(o),", "combine((np.stack(o).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),"
        ),
    ),
    Exhibit(
        21,
        "one split leaves its lse unwritten",
        _F16,
        _in_forward("np.stack(lse),", "np.stack([*lse[:-1], np.full_like(lse[-1], np.nan)]),"),
    ),
    Exhibit(22, "P V is chained in the 13-bit accumulator", _FP8, Fault("no_promotion"), "offset_v"),
    Exhibit(23, "O is kept in fp16", _F16, Fault("fp16_accumulator")),
    Exhibit(
        24,
        "no rescale while the maximum grows by less than 16: P saturates, its sum does not",
        _FP8,
        _in_softmax(
            "new_max = float32.fmax(state.row_max, block_max)",
            "new_max = float32.fmax(state.row_max, block_max)\n        new_max = np.where("
            "new_max - state.row_max < 4, state.row_max, new_max)",
        ),
        "peaky",
    ),
    Exhibit(25, "Q takes the descale of K", _FP8, fed(forward_faults.descale_of_k)),
    Exhibit(26, "descales are ignored", _FP8, Fault("descales_ignored")),
    Exhibit(27, "one descale for every sequence and head", _FP8, fed(forward_faults.one_descale)),
    Exhibit(
        29,
        "no P offset in one branch",
        _FP8,
        where(Fault("no_p_offset"), lambda p: p.causal and p.head_dim == 128),
        "error_within_bound",
    ),
    Exhibit(30, "rows of V are exchanged in the transpose", _FP8, Fault("swapped_v_rows")),
    Exhibit(31, "the lse of FP8 keeps its 2^8", _FP8, Fault("lse_keeps_offset")),
    Exhibit(32, "FP8 is computed in higher precision", _FP8, forward_faults.in_higher_precision),
    Exhibit(62, "the key tile depends on the batch", _F16, forward_faults.tile_of_batch, _BITS_OF_ONE),
    Exhibit(
        63,
        "another exp2 where no key is masked",
        _F16,
        _in_forward(
            "        ratio = np.float32(1) if",
            "        p = p * np.float32(1 + 8e-5) if masked is s else p\n        ratio = np.float32(1) if",
        ),
        "causal_row_equals_truncated_problem",
    ),
    Exhibit(65, "the left end of a window is left out", _F16, posed(forward_faults.narrower)),
    Exhibit(66, "a window is one key too wide", _F16, Fault("window_off_by_one")),
    Exhibit(67, "another convention of windows", _F16, posed(forward_faults.narrower)),
    Exhibit(
        70,
        "packed sequences see keys beyond their own last",
        _F16,
        where(Fault("unmasked_tail"), lambda p: p.is_varlen),
        "error_within_bound",
    ),
    Exhibit(
        71,
        "causal is ignored for packed sequences",
        _F16,
        posed(lambda p: {"causal": False} if p.is_varlen and p.causal else {}),
        "error_within_bound",
    ),
    Exhibit(72, "causal is aligned top-left", _F16, Fault("causal_top_left")),
    Exhibit(
        75,
        "a loop over sequences ends after the first two (of 256 in the report)",
        _F16,
        forward_faults.third_sequence,
        "varlen_equals_separate_calls",
    ),
    Exhibit(
        76,
        "softcap multiplies by the score",
        _F16,
        _in_forward("tanh = softmax.capped(", "tanh = s * c[:, None] * softmax.capped("),
    ),
    Exhibit(79, "scale 1 / head_dim", _F16, posed(lambda p: {"softmax_scale": p.softmax_scale / p.head_dim**0.5})),
    Exhibit(81, "kv head = head modulo kv heads", _F16, Fault("kv_head_modulo")),
    Exhibit(
        82, "a head map that is right for one group size", _F16, fed(forward_faults.first_kv_head), "error_within_bound"
    ),
    Exhibit(83, "a tile of packed heads takes one kv head", _F16, fed(forward_faults.head_of_tile_start)),
    Exhibit(91, "one NaN, which a comparator may take for anything", _F16, forward_faults.one_nan),
)

OUTSIDE: dict[int, str] = {
    12: "no sink among what is judged",
    20: "num_splits is the caller's here; which one a host chooses changes no result that is judged",
    78: "no sink among what is judged",
    80: "no dropout among what is judged",
    87: "twins take no strides; views_are_read_by_their_strides judges kernels that do",
}


def gradients() -> Iterator[Exhibit]:
    """Reports about gradients."""
    for name, row in gradient_faults.MUSEUM.items():
        for number in map(int, re.findall(r"\d+", name)):
            what = (row.mistake.__doc__ or row.source).partition("\n")[0]
            kernel = gradient_faults.kernel_of(row).name

            def made(row: gradient_faults.Row = row) -> Kernel:
                return gradient_faults.kernel_of(row)

            yield Exhibit(number, what, kernel, made, row.law or row.family)


def schedules() -> Iterator[Exhibit]:
    """Reports about time; row 0 is of none."""
    for number, what, program in schedule_faults.PLANTED:
        if number:
            yield Exhibit(number, what, SIMULATOR, program, "hazards")


def exhibits() -> tuple[Exhibit, ...]:
    """Every plant, by row."""
    return tuple(sorted((*FORWARD, *gradients(), *schedules()), key=lambda exhibit: exhibit.row))


def kernel_of_exhibit(exhibit: Exhibit, *, bits: bool) -> Kernel:
    """Return the mistaken kernel of an exhibit that is none of a schedule; in a process of its own (see
    :func:`fa3_kernels.faults.table.load`).
    """
    sound = exhibit.sound
    plant = exhibit.plant
    if isinstance(plant, Rewrite):
        wrong = mutant_kernel(exhibit.kernel, load(ALIAS, plant), bits=bits)
    elif isinstance(plant, StrEnum):
        wrong = registry.find(f"{exhibit.kernel}+{plant}")
    elif sound.operation == operations.FORWARD:
        wrong = sound.altered(run=_around(plant))
    else:
        wrong = plant()
    name = f"{exhibit.kernel}+museum"
    return replace(wrong, name=name, features=sound.features, twin=sound if bits else None)


def _around(mistake: Mistake) -> Callable[[AttentionProblem, Operands, Any], Result]:
    from fa3_kernels.twin.forward import forward

    def run(problem: AttentionProblem, operands: Operands, config: Any) -> Result:
        def twin(
            p: AttentionProblem = problem, o: Operands = operands, c: Any = config, fault: Fault | None = None
        ) -> Result:
            return Result(*(faulty(fault) if fault else forward)(p, o, c))

        with np.errstate(all="ignore"):
            return mistake(problem, operands, config, twin)

    return run


def show(exhibit: Exhibit, profile: ProfileName = "quick", *, bits: bool = True) -> Examination:
    """Examine one exhibit; of a schedule only whether the hazard checker finds it."""
    if exhibit.task == "hazards":
        program: Program = exhibit.plant()  # type: ignore[operator]
        found = check(program, load_machine("h200"), orders=ORDERS)
        return Examination(("hazards",) if found else (), "hazards" if found else "", SIMULATOR, "", 1, 0.0)
    return judged(exhibit, profile, bits=bits)


def judged(exhibit: Exhibit, profile: ProfileName, *, bits: bool) -> Examination:
    """Examine one exhibit that is none of a schedule."""
    others = [task for task in tasks(exhibit.sound, profile) if task != exhibit.task]
    plan = [(exhibit.kernel, task) for task in (exhibit.task, *others)]
    found = examine(lambda kernel: kernel_of_exhibit(exhibit, bits=bits), plan, profile, SEED)
    assert found is not None  # it has no end
    return found
