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
[12, 9]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from runpy import run_path
from typing import Any

from fa3_reference.rules import require
from fa3_simulator.launch import Launch, Tiles, tiles_of
from fa3_simulator.program import NamedBarrier, Program, Work
from fa3_simulator.schedule import Cta

Values = Mapping[str, object]  # of parameters, by their names
START_CYCLES = 600  # from the end of a CTA to the first instruction of the next one in its place; assumed


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

    def cta(self, tiles: Tiles) -> Cta:
        """Return the CTA that works through ``tiles``, with all that was written."""
        build = self.description.build
        cta = Cta(self.name, build.__code__.co_filename)
        build(cta, tiles_of(tiles), **self._of(build))
        return cta

    def program(self, tiles: Tiles) -> Program:
        """Return the program of one CTA that works through ``tiles``."""
        return self.cta(tiles).build()

    def resident(self, tiles: Tiles, together: int) -> Program:
        """Return the program of an SM on which so many CTAs do the same ``tiles`` beside each other.

        Where a tile has a CTA of its own, these CTAs come one behind another in the same place.
        """
        build = self.description.build
        listed = tiles_of(tiles)
        lives = [listed] if self.launch().persistent else [[tile] for tile in listed]
        sm = Cta(self.name)
        for number in range(together):
            sm.rank = f"CTA {number} " if together > 1 else ""
            for life, some in enumerate(lives):
                sm.life = f" of CTA {life}" if life else ""
                sm.identities = 0
                build(sm, some, **self._of(build))
                if life + 1 < len(lives):
                    self._leave(sm)
        return sm.build()

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

    The file is executed. ValueError where it has none.
    """
    require(path.is_file(), f"there is no file {path}")
    found = {x.name: x for x in run_path(str(path)).values() if isinstance(x, Description)}
    require(bool(found), f"{path} describes no kernel: decorate a function with fa3verify.schedule.kernel")
    return found
