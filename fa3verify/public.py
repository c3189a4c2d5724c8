"""The verbs of the command line as functions, and the decorator that declares a kernel.

Users reach them as names of ``fa3verify``. The verbs' own code stands in :mod:`fa3verify.commands`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Never, TypeVar, cast

from fa3_kernels.plan.config import Setting
from fa3_kernels.plan.families import OURS
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3_reference.rules import require
from fa3verify.campaign.profiles import PROFILES, ProfileName
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.loading import MADE
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.operations import FORWARD

if TYPE_CHECKING:
    from typing import Unpack

    from fa3_simulator.machine import Machine
    from fa3_simulator.run import Estimate
    from fa3_simulator.tune import Ranked
    from fa3verify.campaign.questions import Answer
    from fa3verify.campaign.run import Run
    from fa3verify.commands.replay import Replayed
    from fa3verify.judging.judgement import Judgement
    from fa3verify.kernels.functions import KernelFacts

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(*refused: Never, **facts: Unpack[KernelFacts]) -> Callable[[Function], Function]:
    """Declare the function of arrays below it to be a kernel, which stays the function that it is.

    ``module:function``, or ``module:function.bf16`` of several dtypes, then names the kernel for
    :func:`fa3verify.find_kernel` and for ``fa3verify verify``.

    Parameters
    ----------
    *refused : nothing
        Anything here is an error: who writes ``kernel("twin.fp16")`` wants :func:`fa3verify.find_kernel`.
    **facts : KernelFacts
        As :func:`fa3verify.kernels.functions.array_kernel` takes them, which says what the function is called with.
        With ``like="sdpa"``, or another of :mod:`fa3verify.kernels.conventions`, it is called as that public function
        is, and declares what that does.

    Returns
    -------
    callable
        A decorator, which returns the function itself, or a partial one of a method or a builtin function.

    Raises
    ------
    ValueError
        If a fact is misspelt, or anything is given without a keyword.

    Examples
    --------
    >>> @kernel(dtypes=("fp16", "bf16"), library="torch", features=("causal",))
    ... def mine(q, k, v, *, softmax_scale, causal): ...
    """
    if refused:
        raise ValueError(
            f"kernel(...) declares the function below it and takes keywords alone, got {refused[0]!r}: "
            "a kernel is looked up by find_kernel(name)"
        )

    def declare(function: Function) -> Function:
        from fa3verify.kernels.functions import declared_kernels
        from fa3verify.properties import check_claims

        check_claims(facts.get("bitwise", ()))
        made = declared_kernels(function, {**facts})
        try:
            setattr(function, MADE, made)
        except AttributeError:  # methods and builtin functions have no room for it
            function = cast("Function", partial(function))
            setattr(function, MADE, made)
        return function

    return declare


def judge(
    kernel: Kernel | str,
    problem: AttentionProblem | Case,
    recipe: Recipe | None = None,
    *,
    scheme: QuantScheme | None = None,
    **changes: Setting,
) -> Judgement:
    """Run a kernel on inputs drawn by a recipe, compare with float64 and divide by the bound.

    Parameters
    ----------
    kernel : Kernel or str
        The kernel, or its name.
    problem : AttentionProblem or Case
        What is computed; a Case says recipe, scheme and changes as well.
    recipe : Recipe, optional
        Standard normal inputs by default.
    scheme : QuantScheme, optional
        How an e4m3 problem of a forward is quantised; one descale per head by default.
    **changes : bool, int, str or tuple
        Fields of the kernel's configuration that differ from its default, such as ``tile_n=64``.

    Returns
    -------
    Judgement
        ``measures["ratio_max"]`` is the largest error over its bound: at most 1 for a sound kernel, inf where it
        returns NaN, or an infinity, although truth and bound are finite. Where nothing is promised the ratio is 0.

    Raises
    ------
    ValueError
        If the kernel is unknown or does not take the problem, or if something is given beside a Case that it says
        itself.
    KernelError
        If the kernel raises, changes its operands, or returns what it does not declare.

    Examples
    --------
    >>> problem = AttentionProblem(1, 1, 1, 16, 64, 64, dtype="e4m3")
    >>> judge("twin.e4m3", problem).measures["ratio_max"] < 1
    True
    >>> judge("twin.e4m3+truncated_p", problem, promotion_interval=0).measures["ratio_max"] < 1
    False
    >>> judge("twin.quantize", problem, block_rows=32, rotate=True).measures["ratio_max"] < 1
    True
    """
    from fa3verify.judging.judgement import judge

    kernel = find(kernel) if isinstance(kernel, str) else kernel
    if isinstance(problem, Case):
        require(not (recipe or scheme or changes), "a Case says recipe, scheme and changes itself: change the case")
        return judge(kernel, replace(problem, kernel=kernel.name))
    if problem.dtype == "e4m3" and kernel.operation == FORWARD:
        scheme = scheme or QuantScheme()
    ordered = tuple(sorted(changes.items()))
    case = Case(kernel.name, problem, recipe or Recipe("normal"), scheme, ordered, kernel.operation)
    return judge(kernel, case)


def verify(
    kernels: str | Iterable[str] = (),
    *,
    profile: ProfileName = "quick",
    out: str | Path = "out",
    seed: int = 0,
    baseline: str | Path | None = None,
    activations: str | Path | None = None,
    workers: int = 0,
    questions: Answer = "ask",
) -> Run:
    """Judge kernels on every input family and property, and write the report; what ``fa3verify verify`` does.

    Worker processes import the main module again: in a script, call this below ``if __name__ == "__main__":``.

    Parameters
    ----------
    kernels : str or iterable of str
        Names, ``module:function`` or ``file.py:function``; all twins by default.
    profile : {"quick", "release", "soak"}
        How much is tried.
    out : str or Path
        Where ``report.html``, ``summary.json``, ``run.nc`` and the replay files go.
    seed : int
        Seed of every draw; one seed gives the same cases on every machine.
    baseline : str or Path, optional
        File of a baseline to compare with instead of the shipped one.
    activations : str or Path, optional
        Folder of npz files of q, k and v of a model of one's own, or one of them, to judge the kernels on as well.
    workers : int
        Number of processes; 0 is one per core.
    questions : {"ask", "fail", "pass"}
        What a contract that a kernel has and did not declare does to the verdict: it is ``"question"``, the contract is
        a finding, or it only stands in ``Run.questions``.

    Returns
    -------
    Run
        What ``summary.json`` holds; ``verdict`` is ``"pass"``, ``"fail"``, ``"question"`` or ``"inconclusive"``.

    Raises
    ------
    ValueError
        For an unknown or unavailable kernel, a bad profile or baseline, a damaged or foreign file of activations, or a
        folder that cannot be written.

    Examples
    --------
    >>> verify("twin.fp17")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: unknown kernel 'twin.fp17'; did you mean twin.fp16? ...
    """
    from fa3verify.commands import verify
    from fa3verify.kernels import twins

    names = (kernels,) if isinstance(kernels, str) else tuple(kernels) or tuple(c.name for c in twins.BUILT_IN)
    require(profile in PROFILES, f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    command = f"fa3verify.verify({names!r}, profile={profile!r}, seed={seed})"
    stored = Path(baseline) if baseline else None
    own = Path(activations) if activations else None
    settings = verify.Settings(
        names, profile, seed, Path(out), stored, workers=workers, command=command, activations=own, answer=questions
    )
    return verify.run(settings, lambda total, outcome: None)


def replay(file: str | Path, kernel: str | None = None, activations: str | Path | None = None) -> Replayed:
    """Run a replay file again, with the kernel it names or another one.

    Parameters
    ----------
    file : str or Path
        A file that a campaign wrote below ``OUT/worst``.
    kernel : str, optional
        Name of another kernel to run it with.
    activations : str or Path, optional
        Folder with the user's own activations, if they are not where they were.

    Returns
    -------
    Replayed
        Whether the kernel holds, in words and in figures.

    Raises
    ------
    ValueError
        If the file is missing, damaged or foreign, or the kernel is unknown, or activations are missing or others.

    Examples
    --------
    >>> replay("none.json")
    Traceback (most recent call last):
        ...
    ValueError: none.json cannot be read: No such file or directory
    """
    from fa3verify.campaign import replay_files
    from fa3verify.commands import replay

    return replay.run(replay_files.read(Path(file)), kernel, Path(activations) if activations else None)


def simulate(
    problem: AttentionProblem,
    tile: tuple[int, int] | None = None,
    *,
    machine: Machine | str = "h200",
    clock_mhz: float | None = None,
    pack_gqa: bool | None = None,
    backward: bool = False,
    family: str = OURS,
    **switches: Setting,
) -> Estimate:
    """Simulate one schedule; what ``fa3verify simulate`` does.

    Parameters
    ----------
    problem : AttentionProblem
        What the launch computes: with windows and packed sequences, and a forward over a ``cache`` too.
    tile : (int, int), optional
        Query rows and keys; by default those that the family launches.
    machine : Machine or str
        A Machine, ``"h100"``, ``"h200"`` or a .toml file.
    clock_mhz : float, optional
        SM clock in MHz; the machine's maximum by default.
    pack_gqa : bool, optional
        Whether rows of a tile are the heads of a group. By default they are apart, and with a window, of packed
        sequences and over a cache as a call of our functions has them, as ``num_splits`` is.
    backward : bool
        Whether the gradients are simulated, of grouped heads, windows and sequences of their own lengths too.
    family : str
        Whose program it is (:data:`fa3_kernels.plan.families.FAMILIES`), such as ``"flash3"``; ours by default.
    **switches : bool, int, str or tuple
        Other fields of :class:`fa3_kernels.plan.config.Config`, such as ``pingpong=False``; backward of
        :class:`fa3_simulator.backward_schedule.BackwardSchedule`. Those that are not given are as the family launches
        the tile.

    Returns
    -------
    Estimate
        Cycles and seconds of the launch. ``interval`` are the ends of the 90 % interval of measured cycles, and
        ``held_out`` says of which timings of an H200 they are; both are None where too few launches alike were timed.

    Raises
    ------
    ValueError
        If the schedule is not legal or does not fit an SM, or for a problem that the simulator or a launch refuses.

    Examples
    --------
    >>> problem = AttentionProblem(1, 16, 16, 8192, 8192, 128)
    >>> found = simulate(problem, tile=(128, 128), machine="h200")
    >>> round(found.cycles), f"{found.seconds * 1e3:.4f} ms"
    (1302302, '0.6577 ms')
    """
    from fa3_simulator import backward_choice, forward_choice
    from fa3_simulator.machine import load
    from fa3_simulator.run import estimate
    from fa3_simulator.tune import check_fits

    machine = load(machine) if isinstance(machine, str) else machine
    if backward:
        config = backward_choice.schedule_for(problem, family, tile=tile, **switches)
    else:
        config = forward_choice.schedule_for(
            problem, family, tile=tile, pack_gqa=pack_gqa, sms=int(machine["sms"]), **switches
        )
    check_fits(config, machine)
    return estimate(problem, config, machine, clock_mhz)


def tune(
    problem: AttentionProblem,
    *,
    machine: Machine | str = "h200",
    clock_mhz: float | None = None,
    pack_gqa: bool | None = None,
    backward: bool = False,
    family: str = OURS,
) -> list[Ranked]:
    """Simulate every tile and schedule that fits, and rank them, fastest first; what ``fa3verify tune`` does.

    Where tiles are fewer than SMs the keys are cut into parts too (``config.num_splits``).

    Parameters
    ----------
    problem : AttentionProblem
        What the launch computes, as in :func:`simulate`.
    machine : Machine or str
        A Machine, ``"h100"``, ``"h200"`` or a .toml file.
    clock_mhz : float, optional
        SM clock in MHz; the machine's maximum by default.
    pack_gqa : bool, optional
        Whether forward schedules have the heads of a group packed; both are ranked by default.
    backward : bool
        Whether schedules of the gradients are ranked.
    family : str
        Whose schedules (:data:`fa3_kernels.plan.families.FAMILIES`): by default those of our program, as in
        :func:`simulate`, and flash3 all that CUTLASS can build.

    Returns
    -------
    list of Ranked
        Fastest first.

    Raises
    ------
    ValueError
        If the problem is one the simulator does not know or is larger than a launch can be, or the machine or family
        is unknown.

    Examples
    --------
    >>> ranked = tune(AttentionProblem(1, 16, 16, 2048, 2048, 256))
    >>> best = ranked[0].config
    >>> best.tile_m, best.tile_n
    (128, 80)
    """
    from fa3_simulator.machine import load
    from fa3_simulator.tune import tune

    machine = load(machine) if isinstance(machine, str) else machine
    return tune(problem, machine, clock_mhz, family=family, pack_gqa=pack_gqa, backward=backward)
