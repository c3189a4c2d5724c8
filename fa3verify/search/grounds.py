"""The grounds on which a kernel is searched, and one search on one of them.

A ground is a list of islands or a kind of cases. Islands are fixed shapes whose operands are bred by evolution
(:mod:`fa3verify.search.climb`). Cases are drawn by Hypothesis, whose ``target`` makes it climb. A random search draws
cases of the island's shape as the suite draws them. :mod:`fa3verify.search.run` plans a whole hunt over all grounds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.errors import Unsatisfiable

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.inputs.strategies import recipes
from fa3verify.kernels import watch
from fa3verify.kernels.record import Kernel
from fa3verify.operations import FORWARD
from fa3verify.properties.trials import LONG, Wanted, small_cases
from fa3verify.search.climb import Findings
from fa3verify.search.forward.colony import Island
from fa3verify.search.forward.search import ForwardSearch
from fa3verify.search.objectives import Objective

# Examples of one run of Hypothesis. A led run is longer, as it climbs by varying its own earlier examples.
LED_RUN = 200
RANDOM_RUN = 20


@dataclass(frozen=True, slots=True)
class Ground:
    """Holds one ground: islands, which share a budget, or without islands the kind of cases to draw."""

    name: str
    islands: tuple[Island, ...] = ()
    wanted: Wanted = field(default_factory=Wanted)


# Few keys let a single operation's error stand alone, several tiles rescale, thousands let errors of one sign add up.
# Format, tile, rows and channels are replaced by those of the kernel and of a layout below.
_SHAPES = (
    Island("few", "fp16", 16, 128),
    Island("tile", "fp16", 128, 128),
    Island("tiles", "fp16", 384, 128),
    Island("long", "fp16", 2048, 128),
    Island("splits", "fp16", 512, 128, num_splits=3),
    Island("softcap", "fp16", 64, 128, softcap=True),
    Island("causal", "fp16", 160, 128, causal=True),
)
# Rows of one batch with channels of their own: few of them make scores that are all but exact, and cost little time.
_BY_ROW: tuple[dict[str, int], ...] = (
    {"rows": 16, "width": 1, "columns": 32},
    {"rows": 16, "width": 1, "columns": 16},
    {"rows": 16, "width": 4, "columns": 64},
    {"rows": 16, "width": 8, "columns": 128},
    {"rows": 64, "width": 1, "columns": 64},
)
# One row in each batch, whose scores are chains of many products, which the tensor core cuts. e4m3 kernels that take
# one descale per sequence have only these, so that every row has a descale of its own.
_BY_BATCH: tuple[dict[str, int], ...] = (
    {"batch": 16, "rows": 1, "width": 16, "columns": 16},
    {"batch": 16, "rows": 1, "width": 64, "columns": 64},
    {"batch": 16, "rows": 1, "width": 128, "columns": 128},
)
_CHAINS: tuple[dict[str, int], ...] = ({"batch": 16, "rows": 1, "width": 64, "columns": 64}, *_BY_BATCH[2:])
_CASES = (
    Ground("cases", wanted=Wanted(absorbed=True)),
    Ground("long cases", wanted=Wanted(absorbed=True, seqlens_k=LONG, longest_q=4, empty=False)),
)


def grounds_of(kernel: Kernel, others: tuple[Kernel, ...] = ()) -> tuple[Ground, ...]:
    """Return where a kernel can be hunted, together with others; islands of forward kernels only."""
    if kernel.operation != FORWARD or kernel.dtype == "fp32":
        return _CASES if kernel.operation == FORWARD else _CASES[:1]
    kernels = (kernel, *others)
    by_batch = kernel.dtype == "e4m3" and not all("block_descale" in each.features for each in kernels)
    layouts = (_BY_BATCH,) if by_batch else (_BY_ROW, _BY_BATCH)
    candidates = [(shape, [_island(kernels, shape, each) for each in layouts]) for shape in _SHAPES]
    chains = Island("chains", "fp16", 16, 128)
    candidates.append((chains, [_island(kernels, chains, _CHAINS)]))
    grounds = [Ground(shape.name, tuple(island for island in islands if island)) for shape, islands in candidates]
    return *(ground for ground in grounds if ground.islands), *_CASES


def ground_of(kernel: Kernel, name: str, others: tuple[Kernel, ...] = ()) -> Ground:
    """Return the ground of a name; ValueError where a kernel has none."""
    known = {ground.name: ground for ground in grounds_of(kernel, others)}
    if name not in known:
        raise ValueError(f"ground of {kernel.name} must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _island(kernels: tuple[Kernel, ...], shape: Island, layouts: tuple[dict[str, int], ...]) -> Island | None:
    """Return an island of the first layout that all kernels take, with the first kernel's tile; None if none fits."""
    if shape.num_splits > 1 and not all("num_splits" in kernel.changeable for kernel in kernels):
        return None
    if shape.causal and any(kernel.policy.causal == "top_left" for kernel in kernels):
        return None
    first = kernels[0]
    multiple = max(kernel.sizes.seqlen_multiple for kernel in kernels)
    keys = -(-shape.keys // multiple) * multiple
    for layout in layouts:
        island = replace(shape, dtype=first.dtype, keys=keys, **layout)
        problem = island.problem(1.0, 1.0)
        if all(kernel.refusal(problem) is None for kernel in kernels):
            config = first.config_for(problem)
            return _configured(island, config) if isinstance(config, Config) else island
    return None


def _configured(island: Island, config: Config) -> Island:
    """Return an island with the tile, promotion and family of a configuration, which lead its mutations."""
    known = config.family if config.traits.is_reproduced else OURS
    choices = {"promotion_interval": config.promotion_interval, "out_dtype": config.out_dtype}
    blocks = {"descale_tiles": 1} if island.dtype == "e4m3" and island.rows > 1 else {}
    return replace(island, tile_n=config.tile_n, family=known, **choices, **blocks)


def search(
    kernel: Kernel,
    objective: Objective,
    ground: Ground,
    seed: list[int],
    problems: int,
    *,
    start: Json | None = None,
    at_random: bool = False,
    seconds: float = float("inf"),
) -> Findings:
    """Search one ground from normal inputs, or from ``start``, the JSON of an individual of one of its islands.

    Parameters
    ----------
    seed : list of int
        Decides what is tried.
    problems : int
        How many problems are judged; the last generation or run may exceed it.
    at_random : bool
        Draw as the suite draws, instead of searching.
    seconds : float
        CPU seconds after which no further generation or run begins.
    """
    judge = objective.of_colonies(kernel) if ground.islands and not at_random else None
    if judge is None:
        return _draw(kernel, objective, ground, seed, problems, not at_random, seconds)
    found = Findings()
    shares = len(ground.islands)
    for index, island in enumerate(ground.islands):
        first = ForwardSearch.individual(start) if start and start["island"] == asdict(island) else None
        run = ForwardSearch(island, [*seed, index], judge, first)
        found.add(_evolve(run, -(-problems // shares), seconds / shares))
    return found


def _evolve(run: ForwardSearch, problems: int, seconds: float) -> Findings:
    found = run.found
    began = time.process_time()
    while found.problems < problems and found.cpu_s < seconds:
        watch.trying("a generation", lambda: {"island": asdict(run.island), "generation": found.generations})
        run.generation()
        found.cpu_s = time.process_time() - began
    return found


def _draw(
    kernel: Kernel,
    objective: Objective,
    ground: Ground,
    seed: list[int],
    problems: int,
    led: bool,
    seconds: float,
) -> Findings:
    """Draw cases in short runs of Hypothesis, each with a seed of its own; ``led`` runs climb."""
    found = Findings()
    began = time.process_time()
    drawn = _alike(kernel, ground.islands[0]) if ground.islands else small_cases(kernel, ground.wanted)
    weight = ground.islands[0].problems if ground.islands else 1

    def examine(case: Case) -> None:
        watch.trying("a hunt", case.to_json)
        found.problems, found.cpu_s = found.problems + weight, time.process_time() - began
        try:
            values = objective.of_case(kernel, case)
        except ValueError:  # it does not take the case
            return
        for name, value in values.items():
            found.meet(name, value, lambda: {"case": case.to_json()})
            if led and abs(value) < float("inf"):
                hypothesis.target(value, label=name)

    run = 0
    while found.problems < problems and found.cpu_s < seconds:
        before = found.problems
        left = -(-(problems - found.problems) // weight)
        with contextlib.suppress(Unsatisfiable):
            _run(
                examine,
                drawn,
                int.from_bytes(repr([*seed, run]).encode()),
                min(LED_RUN if led else RANDOM_RUN, left),
                led,
            )
        run += 1
        if found.problems == before:  # no case can be drawn
            break
    return found


def _run(examine: Callable[[Case], None], drawn: st.SearchStrategy[Case], seed: int, examples: int, led: bool) -> None:
    configured = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.target) if led else (Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
        verbosity=hypothesis.Verbosity.quiet,
    )
    hypothesis.seed(seed)(configured(given(drawn)(examine)))()


@st.composite
def _alike(draw: st.DrawFn, kernel: Kernel, island: Island) -> Case:
    """Draw a case of an island's shape as the suite draws inputs; a softmax_scale of None is the default one."""
    problem = replace(island.problem(1.0, 30.0), softmax_scale=draw(st.sampled_from((None, 0.25, 0.05))))
    recipe = draw(recipes(problem=problem, max_edits=2))
    of_forward = operations.find(FORWARD)
    scheme, _ = of_forward.draw_choices(draw, problem, kernel.features, kernel.code.configure, Wanted().descales)
    changes = (("num_splits", island.num_splits),) if island.num_splits > 1 else ()
    return Case(kernel.name, problem, recipe, scheme, changes)


def value_of(kernel: Kernel, objective: Objective, content: Json) -> dict[str, float]:
    """Judge a stored input again, a case or an individual of an island; return the figure of each output.

    Raises
    ------
    ValueError
        If the content is damaged, or the kernel does not take it.
    """
    if "case" in content:
        case = Case.from_json(content["case"])
        return objective.of_case(kernel, replace(case, kernel=kernel.name))
    judge = objective.of_colonies(kernel)
    if judge is None:
        raise ValueError(f"{kernel.name} is not judged on islands")
    return judge.again(*ForwardSearch.individual(content))
