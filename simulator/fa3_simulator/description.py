"""Anybody's kernel as a page of Python, in the words of :mod:`fa3_simulator.schedule`.

A description is a function that writes the instruction streams of one CTA for a list of tiles, with a second function
that says what a launch is. Called with values of its parameters it is a :class:`Schedule`, which the simulator, the
hazard proof, the timeline and the tuner read as they read the kernels that ship (:mod:`fa3_simulator.described`). Users
import it as :mod:`fa3verify.schedule`; ``docs/schedule.md`` is the tutorial.

>>> @kernel
... def copy(cta, tiles, *, stages=2):
...     ring = cta.ring("A", stages, 16384)
...     consumer = cta.warpgroup("consumer", registers=240)
...     producer = cta.warp("producer", registers=24)
...     for tile in tiles:
...         for _ in range(tile.blocks):
...             producer.tma_load(producer.acquire(ring))
...             stage = consumer.wait_full(ring)
...             consumer.read(stage.slot)
...             consumer.release(stage)
>>> [len(actor.ops) for actor in copy(stages=3).program([4]).actors]
[16, 9]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from runpy import run_path
from traceback import extract_tb
from typing import Any

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_reference.rules import require
from fa3_simulator.launch import Launch, Tiles, tiles_of
from fa3_simulator.program import BY_THREADS, Actor, NamedBarrier, Op, Program, Work
from fa3_simulator.schedule import COPY_BYTES, Cta

Values = Mapping[str, object]  # of parameters, by their names
START_CYCLES = 320  # from a CTA's end to the next one's first instruction: reports/h200/schedules/latencies.csv

BLOCKS = (8, 12)  # of the tiles that are compared; both even, as there are kernels whose steps are pairs of blocks
COUNTS = ("fma", "alu", "mufu", "convert", "shuffle", "other", "smem_bytes")  # those of a ``vector``
_PLAIN = {
    Op.EXPECT: "arrive",
    Op.ARRIVE: "arrive",
    Op.WAIT: "wait",
    Op.STORE_WAIT: "wait",
    Op.BAR_ARRIVE: "bar",
    Op.BAR_SYNC: "bar",
    Op.STORE: "tma store",
    Op.LOAD: "tma load",
}


def _warps(actor: Actor, count: str) -> float:
    """Return of how many warps a count of :class:`Work` is: traffic is of all, instructions are of one of four."""
    return actor.threads / WARP_THREADS if count == "smem_bytes" else min(1.0, actor.threads / WARPGROUP_THREADS)


def _declared(program: Program, actor: Actor) -> Counter[str]:
    """Count what an actor does, in instructions of one warp by class; and ``chunks`` of its vector work."""
    found: Counter[str] = Counter()
    for op, x, size, _, how in actor.ops.tolist():
        if op == Op.VECTOR:
            work = program.works[x]
            found.update({x: getattr(work, x) / _warps(actor, x) for x in COUNTS} | {"chunks": work.chunks})
        elif op == Op.WGMMA:
            gemm = program.gemms[x]
            shape = f"64x{gemm.n}x{256 // gemm.bits}" if gemm.rate == 1 else f"168{256 // gemm.bits}"
            warps = max(1.0, actor.threads / WARPGROUP_THREADS) / (1 if gemm.rate == 1 else gemm.n / 8)
            found.update({shape: gemm.instructions / warps})
        elif op == Op.LOAD and how & BY_THREADS:
            found["cp.async"] += -(-size // (COPY_BYTES * actor.threads))
        else:
            found[_PLAIN.get(Op(op), "")] += 1
    return found


@dataclass(frozen=True, slots=True)
class Schedule:
    """A description with values of its parameters: of the kernel, by keyword, and of the launch.

    Two schedules of one description with equal values are equal, whatever their order.
    """

    description: Description
    values: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The name of the function, with the values that are not its defaults."""
        given = [f"{name}={value}" for name, value in self.values if value != self.description.parameters[name]]
        return f"{self.description.name}({', '.join(given)})" if given else self.description.name

    def _of(self, function: Callable[..., Any]) -> Values:
        known = signature(function).parameters
        return {name: value for name, value in self.values if name in known}

    def launch(self) -> Launch:
        """Return what a launch is; ValueError for a description that does not say so."""
        launcher = self.description.launcher
        if launcher is None:
            raise ValueError(f"{self.description.name} does not say what a launch is: decorate a function with .launch")
        return launcher(**self._of(launcher))

    def _write(self, cta: Cta, tiles: Tiles) -> None:
        """Let the description write what warps do; ValueError, with its line, for a slip of Python."""
        build = self.description.build
        origin = build.__code__.co_filename
        try:
            build(cta, tiles_of(tiles), **self._of(build))
        except (AttributeError, LookupError, NameError, TypeError) as error:
            own = [x.lineno for x in extract_tb(error.__traceback__) if x.filename == origin]
            raise ValueError(f"{Path(origin).name}:{own[-1]}: {error}" if own else str(error)) from error

    def cta(self, tiles: Tiles) -> Cta:
        """Return the CTA that works through ``tiles``, with all that was written."""
        cta = Cta(self.name, self.description.build.__code__.co_filename)
        self._write(cta, tiles)
        return cta

    def program(self, tiles: Tiles) -> Program:
        """Return the program of one CTA that works through ``tiles``."""
        return self.cta(tiles).build()

    def resident(self, tiles: Tiles, together: int) -> Cta:
        """Return what runs on an SM on which so many CTAs do the same ``tiles`` beside each other.

        Where a tile has a CTA of its own, these CTAs come one behind another in the same place.
        """
        listed = tiles_of(tiles)
        lives = [listed] if self.launch().persistent else [[tile] for tile in listed]
        sm = Cta(self.name)
        for number in range(together):
            sm.rank = f"CTA {number} " if together > 1 else ""
            for life, some in enumerate(lives):
                sm.life = f" of CTA {life}" if life else ""
                sm.identities = 0
                self._write(sm, some)
                if life + 1 < len(lives):
                    self._leave(sm)
        return sm

    def of_a_block(self) -> dict[str, tuple[Actor, Counter[str]]]:
        """Return what each stream of instructions does for a block more, by the name of the stream.

        A block is what a longer tile has more: prologues and epilogues are left out. Counted are instructions of one
        warp by class, as ``fa3_kernels.audit.sass`` names them, products by the shape of theirs; ``smem_bytes`` of one
        warp; and ``chunks`` of vector work.
        """
        short, long = (self.program([blocks]) for blocks in BLOCKS)
        return {
            actor.name: (
                actor,
                Counter(
                    {
                        x: count / (BLOCKS[1] - BLOCKS[0])
                        for x, count in (_declared(long, actor) - _declared(short, first)).items()
                        if x
                    }
                ),
            )
            for first, actor in zip(short.actors, long.actors, strict=True)
        }

    def filled(self, counts: Mapping[str, Mapping[str, float]]) -> Schedule:
        """Return the schedule with other vector counts of some streams.

        ``counts`` are of one warp and a block, by stream and by :data:`COUNTS`; others are not read. Each ``vector`` of
        a stream, of prologue and epilogue too, is multiplied by what is wanted over what its blocks declare. A count
        that they do not declare is added, shared by chunks. A stream without a ``vector`` in its blocks stays as it is.
        """
        scales = {
            name: {
                x: (n / said[x], 0.0) if said[x] else (1.0, n * _warps(actor, x) / said["chunks"])
                for x, n in counts.get(name, {}).items()
                if x in COUNTS and said["chunks"]
            }
            for name, (actor, said) in self.of_a_block().items()
        }
        build = self.description.build

        @wraps(build)
        def refilled(cta: Cta, tiles: Tiles, **values: object) -> None:
            cta.scales = scales
            build(cta, tiles, **values)

        return replace(self, description=Description(refilled, self.description.launcher))

    @staticmethod
    def _leave(sm: Cta) -> None:
        """Let the warps of a CTA wait for each other, and for the start of the next CTA."""
        mine = [warps for warps in sm.warps if warps.name.startswith(sm.rank)]
        end = NamedBarrier(sm.rank + "end of the CTA", 0, sum(warps.threads for warps in mine))
        for warps in mine:
            warps.bar_sync(end)
            warps.work(Work("start of a CTA", 1, stall=START_CYCLES))


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A kernel that somebody described. Called with values of its parameters, it returns a :class:`Schedule`.

    Parameters
    ----------
    build : callable
        ``build(cta, tiles, *, ...)`` writes what the warps of a CTA do; its keyword parameters need defaults.
    launcher : callable, optional
        Says what a launch is, by sizes of its own and parameters of ``build``; set by :meth:`launch`.
    """

    build: Callable[..., None]
    launcher: Callable[..., Launch] | None = None

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def parameters(self) -> Values:
        """The parameters of kernel and launch, with their defaults."""
        own = [p for p in signature(self.build).parameters.values() if p.kind == Parameter.KEYWORD_ONLY]
        beside = signature(self.launcher).parameters.values() if self.launcher else ()
        return {p.name: p.default for p in (*beside, *own)}

    def launch(self, launcher: Callable[..., Launch]) -> Callable[..., Launch]:
        """Decorate the function that says what a launch is."""
        object.__setattr__(self, "launcher", launcher)
        return launcher

    def __call__(self, **given: Any) -> Schedule:
        """Return the schedule with these values, and defaults for the others; ValueError for an unknown name."""
        known = self.parameters
        for name in given:
            require(name in known, f"{self.name} has no parameter {name}; it has {', '.join(known)}")
        return Schedule(self, tuple(sorted({**known, **given}.items())))


def kernel(build: Callable[..., None]) -> Description:
    """Make a description of a function."""
    return Description(build)


def described(path: Path) -> dict[str, Description]:
    """Return the descriptions of a Python file by the names of their functions.

    The file is executed. ValueError where it has none, or is no Python.
    """
    require(path.is_file(), f"there is no file {path}")
    try:
        found = {x.name: x for x in run_path(str(path)).values() if isinstance(x, Description)}
    except SyntaxError as error:
        raise ValueError(f"{path.name}:{error.lineno}: {error.msg}") from error
    require(bool(found), f"{path} describes no kernel: decorate a function with fa3verify.schedule.kernel")
    return found
