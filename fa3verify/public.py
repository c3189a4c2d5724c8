"""What ``import fa3verify`` offers: the nouns, and the verbs of the command line as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fa3_kernels.plan.config import Config as Config
from fa3_kernels.plan.config import default_config as default_config
from fa3_reference.attention import attention as truth  # noqa: F401
from fa3_reference.bounds import KernelModel as KernelModel
from fa3_reference.bounds.forward import forward_bound as forward_bound
from fa3_reference.problem import AttentionProblem as AttentionProblem
from fa3_reference.problem import Operands as Operands
from fa3_reference.quantize import QuantScheme as QuantScheme
from fa3_reference.quantize import prepare as prepare
from fa3verify.campaign.profiles import PROFILES, ProfileName
from fa3verify.candidates import MADE, find
from fa3verify.candidates import Candidate as Candidate
from fa3verify.candidates import Result as Result
from fa3verify.cases import Case as Case
from fa3verify.inputs.captures import load as load_activations  # noqa: F401
from fa3verify.inputs.recipe import Recipe as Recipe
from fa3verify.operations import FORWARD
from fa3verify.policy import Policy as Policy

if TYPE_CHECKING:
    from fa3_simulator.machine import Machine
    from fa3_simulator.run import Estimate
    from fa3_simulator.tune import Ranked
    from fa3verify.judgement import Judgement


def kernel(name: str = "", /, **facts: Any) -> Any:
    """Return the kernel of a name; without one, a decorator that declares a function of arrays to be a kernel.

    Parameters
    ----------
    name : str
        A name that ``fa3verify kernels`` lists, ``NAME+fault`` for a twin with a planted mistake, or
        ``module:function``.
    facts
        As :func:`fa3verify.adapters.functions.array_candidate` takes them. ``module:function``, or
        ``module:function.bf16`` of several dtypes, then names the kernel; the function itself stays as it is.

    Raises
    ------
    ValueError
        If there is no such kernel, or a fact is misspelt.

    >>> kernel("twin.fp16").dtype
    'fp16'
    >>> @kernel(dtypes=("fp16", "bf16"), library="torch", features=("causal",))
    ... def mine(q, k, v, *, softmax_scale, causal): ...
    """
    if name:
        return find(name)

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        from fa3verify.adapters.functions import array_candidate

        setattr(function, MADE, array_candidate(function, **facts))
        return function

    return declare


def judge(
    candidate: Candidate | str,
    problem: AttentionProblem | Case,
    recipe: Recipe | None = None,
    *,
    scheme: QuantScheme | None = None,
    **changes: Any,
) -> Judgement:
    """Run a kernel on inputs drawn by a recipe, compare with float64 and divide by the bound.

    Parameters
    ----------
    candidate : Candidate or str
        The kernel, or its name.
    problem : AttentionProblem or Case
        A Case says recipe, scheme and changes as well.
    recipe : Recipe, optional
        Standard normal inputs by default.
    scheme : QuantScheme, optional
        How an e4m3 problem of a forward is quantised; one descale per head by default.
    changes
        Fields of the kernel's configuration that differ from its default, such as ``tile_n=64``.

    Returns
    -------
    Judgement
        ``measures["ratio_max"]`` is the largest error over its bound: at most 1 for a sound kernel.

    Raises
    ------
    ValueError
        If the kernel is unknown or does not take the problem, or if something is given beside a Case that it says
        itself.

    >>> problem = AttentionProblem(1, 1, 1, 16, 64, 64, dtype="e4m3")
    >>> judge("twin.e4m3", problem).measures["ratio_max"] < 1
    True
    >>> judge("twin.e4m3+truncated_p", problem, promotion_interval=0).measures["ratio_max"] < 1
    False
    >>> judge("twin.quantize", problem, block_rows=32, rotate=True).measures["ratio_max"] < 1
    True
    """
    from fa3verify.judgement import judge

    candidate = find(candidate) if isinstance(candidate, str) else candidate
    if isinstance(problem, Case):
        if recipe or scheme or changes:
            raise ValueError("a Case says recipe, scheme and changes itself: change the case")
        return judge(candidate, replace(problem, kernel=candidate.name))
    if problem.dtype == "e4m3" and candidate.operation == FORWARD:
        scheme = scheme or QuantScheme()
    ordered = tuple(sorted(changes.items()))
    case = Case(candidate.name, problem, recipe or Recipe("normal"), scheme, ordered, candidate.operation)
    return judge(candidate, case)


def verify(
    kernels: str | Iterable[str] = (),
    *,
    profile: ProfileName = "quick",
    out: str | Path = "out",
    seed: int = 0,
    baseline: str | Path | None = None,
    activations: str | Path | None = None,
    workers: int = 0,
    studies: bool = True,
) -> dict[str, Any]:
    """Judge kernels on every input family and property, and write the report; what ``fa3verify verify`` does.

    Worker processes import the main module again: in a script, call this below ``if __name__ == "__main__":``.

    Parameters
    ----------
    kernels : str or iterable of str
        Names, ``module:function`` or ``file.py:function``; all twins by default.
    out : path
        Where ``report.html``, ``summary.json``, ``run.nc`` and the replay files go.
    baseline : path, optional
        Compare with this one, not with the shipped one.
    activations : path, optional
        Folder of npz files of q, k and v of a model of one's own, or one of them, to judge the kernels on as well.
    workers : int
        Processes; 0 is one per core.
    studies : bool
        Whether to run the studies behind the report's figures.

    Returns
    -------
    dict
        What ``summary.json`` holds; ``["verdict"]`` is ``"pass"``, ``"fail"`` or ``"inconclusive"``.

    Raises
    ------
    ValueError
        For an unknown or unavailable kernel, a bad profile or baseline, a damaged or foreign file of activations, or a
        folder that cannot be written.

    >>> verify("twin.fp17")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: unknown kernel 'twin.fp17'; did you mean twin.fp16? ...
    """
    from fa3verify import candidates
    from fa3verify.campaign import verify

    names = (kernels,) if isinstance(kernels, str) else tuple(kernels) or tuple(c.name for c in candidates.BUILT_IN)
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    command = f"fa3verify.verify({names!r}, profile={profile!r}, seed={seed})"
    stored = Path(baseline) if baseline else None
    own = Path(activations) if activations else None
    settings = verify.Settings(
        names, profile, seed, Path(out), stored, workers=workers, studies=studies, command=command, activations=own
    )
    return verify.run(settings, lambda total, outcome: None)


class Replayed(NamedTuple):
    """Whether the kernel holds what the file says it broke, in words, and the figures of a judged case."""

    holds: bool
    message: str
    measures: dict[str, float] | None


def replay(file: str | Path, kernel: str | None = None, activations: str | Path | None = None) -> Replayed:
    """Run a replay file again, with the kernel it names or another one.

    Parameters
    ----------
    activations : path, optional
        Folder with the user's own activations, if they are not where they were.

    Raises
    ------
    ValueError
        If the file is missing, damaged or foreign, or the kernel is unknown, or activations are missing or others.

    >>> replay("none.json")
    Traceback (most recent call last):
        ...
    ValueError: none.json cannot be read: No such file or directory
    """
    from fa3verify.campaign import replay

    own = Path(activations) if activations else None
    return Replayed(*replay.run(replay.read(Path(file)), kernel, own))


def simulate(
    problem: AttentionProblem,
    tile: tuple[int, int] | None = None,
    *,
    machine: Machine | str = "h200",
    clock_mhz: float | None = None,
    pack_gqa: bool = False,
    backward: bool = False,
    **switches: Any,
) -> Estimate:
    """Simulate one schedule; what ``fa3verify simulate`` does.

    Parameters
    ----------
    tile : (int, int), optional
        Query rows and keys; by default those that the family launches.
    machine : Machine or str
        A Machine, ``"h100"``, ``"h200"`` or a .toml file.
    clock_mhz : float, optional
        SM clock; the machine's maximum by default.
    pack_gqa : bool
        Rows of a tile are the heads of a group, so that K and V are read once.
    backward : bool
        The gradients, of grouped heads, windows and sequences of their own lengths too.
    switches
        Other fields of :class:`fa3_kernels.plan.config.Config`, such as ``pingpong=False`` or ``family="flash3"``;
        backward of :class:`fa3_simulator.backward_schedule.BackwardSchedule`, such as ``turns="shift"``. Those that
        are not given are as the family launches the tile; channels are those that it computes.

    Raises
    ------
    ValueError
        If the schedule is not legal or does not fit an SM, or the problem is one the simulator does not know or is
        larger than a launch can be.

    >>> problem = AttentionProblem(1, 16, 16, 8192, 8192, 128)
    >>> found = simulate(problem, tile=(128, 128), machine="h200")
    >>> round(found.cycles), f"{found.seconds * 1e3:.4f} ms"
    (1302302, '0.6577 ms')
    """
    from fa3_simulator import backward_choice, forward_choice
    from fa3_simulator.machine import load
    from fa3_simulator.run import estimate, launched
    from fa3_simulator.tune import check_fits

    machine = load(machine) if isinstance(machine, str) else machine
    if backward:
        config = backward_choice.schedule_for(problem, tile=tile, **switches)
    else:
        config = forward_choice.schedule_for(problem, tile=tile, pack_gqa=pack_gqa, **switches)
    check_fits(config, machine)
    return estimate(problem, launched(problem, config), machine, clock_mhz)


def tune(
    problem: AttentionProblem,
    *,
    machine: Machine | str = "h200",
    clock_mhz: float | None = None,
    pack_gqa: bool | None = None,
    backward: bool = False,
    family: str = "gluon",
) -> list[Ranked]:
    """Simulate every tile and schedule that fits, and rank them, fastest first; what ``fa3verify tune`` does.

    Where tiles are fewer than SMs the keys are cut into parts too (``config.num_splits``).

    Parameters
    ----------
    problem, machine, clock_mhz, backward
        As in :func:`simulate`.
    pack_gqa : bool, optional
        Forward schedules with the heads of a group packed, or without; both by default.
    family : str
        Whose schedules (:data:`fa3_kernels.plan.traits.FAMILIES`): by default those of our program, as in
        :func:`simulate`, and flash3 all that CUTLASS can build.

    >>> ranked = tune(AttentionProblem(1, 16, 16, 2048, 2048, 256))
    >>> best = ranked[0].config
    >>> best.tile_m, best.tile_n
    (128, 80)
    """
    from fa3_simulator.machine import load
    from fa3_simulator.tune import tune

    machine = load(machine) if isinstance(machine, str) else machine
    return tune(problem, machine, clock_mhz, family=family, pack_gqa=pack_gqa, backward=backward)
