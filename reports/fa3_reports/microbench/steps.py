"""Steps and tiles of a warp-specialised kernel and what synchronises them: rings of two slots that TMA fills,
mbarriers, named barriers and turns; the operands of wgmma are stale. What they take beyond their parts is what
synchronising costs.

mbarriers: 0 and 1 of K, 2 and 3 of V, 4 of Q, 5 and 6 of V that the producer transposes. Named barriers: 1 to 3 join
the warps of a consumer, 4 to 6 are turns, 8 and 9 hand back K, 10 and 11 V, 12 Q; 13 joins the warps of a producer that
transposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fa3_reports.microbench.experiment import Experiment, one_cta
from fa3_reports.microbench.ptx import (
    Body,
    bulk_store,
    bulk_store_wait,
    fence_proxy,
    repeat,
    stamp,
    transpose,
    wgmma_wait,
)
from fa3_reports.microbench.softmax import Dtype, Step, convert, exponentials, keep, maxima, pv, qk, rescale, setup
from fa3_reports.microbench.tiles import STEPS, normalise, output_setup

Order = Literal["serial", "overlap"]
MBARRIERS = (1,) * 7
# RAW: V of e4m3 as loaded
K = 0
V = 2
Q = 4
RAW = 5
# dtype, keys, head_dim, most consumers
SIZES: tuple[tuple[Dtype, int, int, int], ...] = (
    ("fp16", 64, 64, 3),
    ("fp16", 128, 64, 3),
    ("fp16", 32, 128, 2),
    ("fp16", 64, 128, 2),
    ("fp16", 128, 128, 2),
    ("fp16", 64, 256, 2),
    ("e4m3", 128, 64, 3),
    ("e4m3", 64, 128, 2),
    ("e4m3", 128, 128, 2),
)
TILE_SIZES: tuple[tuple[Dtype, int, int, int], ...] = (
    ("fp16", 128, 64, 3),
    ("fp16", 128, 128, 2),
    ("fp16", 64, 256, 2),
)
TILES = 4
TRIP_KEYS = 32
PHASES = 8
PRODUCER_PHASES = 5


@dataclass(frozen=True, slots=True)
class Part:
    """Which consumer of how many, and how they run."""

    index: int
    consumers: int
    order: Order
    pingpong: bool


def _place(name: str, step: str) -> str:
    """Slot and parity of a step into registers."""
    return (
        f"and.b32 %{name}_slot, {step}, 1;\nshr.u32 %{name}_parity, {step}, 1;\n"
        f"and.b32 %{name}_parity, %{name}_parity, 1;\n"
    )


def _wait(barrier: str, parity: str) -> str:
    return (
        "{ .reg .pred %done;\nagain:\n"
        f"mbarrier.try_wait.parity.shared::cta.b64 %done, [{barrier}], {parity};\n@!%done bra again;\n}}\n"
    )


def _wait_full(name: str, first: int) -> str:
    """Wait for the slot of K or V, and its descriptor."""
    return (
        f"shl.b32 %at, %{name}_slot, 3;\nadd.u32 %at, %at, %bars;\n{_wait(f'%at+{8 * first}', f'%{name}_parity')}"
        f"mul.wide.u32 %wide, %{name}_slot, 2048;\nadd.u64 %ring_{name}, %desc_k, %wide;\n"
    )


def _hand_back(name: str, barrier: int, consumers: int) -> str:
    return f"add.u32 %at, %{name}_slot, {barrier};\nbar.arrive %at, {128 * (consumers + 1)};\n"


def _turn(part: Part, *, take: bool) -> str:
    if not part.pingpong:
        return ""
    whose = part.index if take else (part.index + 1) % part.consumers
    return f"bar.{'sync' if take else 'arrive'} {4 + whose}, 256;\n"


def _scores(step: Step) -> str:
    return qk(step).replace("%desc_k", "%ring_k")


def _sum(step: Step) -> str:
    return pv(step).replace("%desc_k", "%ring_v")


def consume(step: Step, part: Part, *, stamped: bool = False) -> str:
    """One step of a consumer: K of step ``%step``, V of the one before.

    ``stamped``, for the overlapped one: a stamp at the start, when its turn comes, when all is issued and the turn
    handed on, when the scores are there, behind the maxima, behind the exponentials, when P V is there, and at the end:
    :data:`PHASES` with the next start.
    """
    join = f"bar.sync {1 + part.index}, 128;\n"
    head = "sub.u32 %at, %step, 1;\n" + _place("v", "%at") + _place("k", "%step") + join
    mark = stamp().text if stamped else ""
    give_k = _hand_back("k", 8, part.consumers)
    give_v = _hand_back("v", 10, part.consumers)
    k = _wait_full("k", K)
    v = _wait_full("v", V)
    take = _turn(part, take=True)
    hand_on = _turn(part, take=False)
    end = "add.u32 %step, %step, 1;\n"
    last = convert(step, carry=False) + rescale(step)
    if part.order == "serial":
        gemms = (
            v
            + k
            + take
            + _sum(step)
            + wgmma_wait(0).text
            + give_v
            + _scores(step)
            + wgmma_wait(0).text
            + give_k
            + hand_on
        )
        return head + gemms + maxima(step) + exponentials(step) + last + end
    gemms = (
        head + k + take + mark + _scores(step) + v + _sum(step) + hand_on + mark + wgmma_wait(1).text + mark + give_k
    )
    return (
        mark
        + gemms
        + maxima(step)
        + mark
        + exponentials(step)
        + mark
        + wgmma_wait(0).text
        + mark
        + give_v
        + last
        + mark
        + end
    )


_REGISTERS = (
    ".reg .b32 %step, %at, %k_slot, %k_parity, %v_slot, %v_parity, %tile;\n.reg .b64 %ring_k, %ring_v;\n"
    "mov.b32 %step, %zero;\n"
)


def _registers(part: Part) -> tuple[int, int]:
    """Of the producer and of a consumer, per thread, as our kernels split them."""
    return {1: (56, 240), 2: (40, 232), 3: (32, 160)}[part.consumers]


def _consumer(step: Step, part: Part, text: Body, *, declares: str = "") -> Body:
    enter = f"setmaxnreg.inc.sync.aligned.u32 {_registers(part)[1]};\n"
    if part.pingpong and part.index == part.consumers - 1:
        enter += "bar.arrive 4, 256;\n"  # the first turn is the first consumer's
    return Body(enter, setup(step) + _REGISTERS + declares) + text + keep(step)


def _first(step: Step, part: Part) -> str:
    """Scores of a tile's first block, and their softmax."""
    return (
        _place("k", "%step")
        + _wait_full("k", K)
        + _turn(part, take=True)
        + _scores(step)
        + _turn(part, take=False)
        + wgmma_wait(0).text
        + _hand_back("k", 8, part.consumers)
        + maxima(step)
        + exponentials(step)
        + convert(step, carry=False)
        + "add.u32 %step, %step, 1;\n"
    )


def _acquire(name: str, back: int, consumers: int) -> str:
    """Wait until the slot of the step is handed back, unless it is new."""
    return (
        f"setp.ge.u32 %old, %step, 2;\nadd.u32 %at, %{name}_slot, {back};\n"
        f"@%old bar.sync %at, {128 * (consumers + 1)};\n"
    )


def _copy(name: str, to: int, barrier: int, size: int) -> str:
    """Start a load to copy slot ``to``, or ``to`` + 1 in odd steps, likewise on its mbarrier."""
    return (
        f"shl.b32 %at, %{name}_slot, 3;\nadd.u32 %at, %at, %bars;\n"
        f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%at+{8 * barrier}], {size};\n"
        f"mul.lo.u32 %to, %{name}_slot, 32768;\nadd.u32 %to, %to, %copies;\n"
        "@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[%to+{to * 32768}], [%from], {size}, [%at+{8 * barrier}];\nadd.u64 %from, %from, {size};\n"
    )


def _loads(step: Step, part: Part) -> Body:
    """K, then V of a step."""
    size = step.n * step.head_dim * (2 if step.dtype == "fp16" else 1)
    text = ""
    for name, to, back in (("k", K, 8), ("v", V, 10)):
        text += _place(name, "%step") + _acquire(name, back, part.consumers) + _copy(name, to, to, size)
    return Body(text + "add.u32 %step, %step, 1;\n")


def _transposed(step: Step, part: Part, *, joins: bool) -> Body:
    """K of a step and V as it is; wait for V and for its slot, transpose it and hand it over.

    ``joins``: its four warps meet where Triton has them meet, in front of every copy and of every trip, and with
    stamps: at the start, when the slot of K is free, when both copies are issued, when V may be transposed, and at the
    end: :data:`PRODUCER_PHASES` with the next start.
    """
    size = step.n * step.head_dim
    join, mark = ("bar.sync 13, 128;\n", stamp().text) if joins else ("", "")
    load = (
        mark
        + _place("k", "%step")
        + _acquire("k", 8, part.consumers)
        + mark
        + join
        + join
        + _copy("k", K, K, size)
        + join
        + _place("v", "%step")
        + _copy("v", V, RAW, size)
        + mark
        + join
        + _wait(f"%at+{8 * RAW}", "%v_parity")
        + _acquire("v", 10, part.consumers)
        + mark
    )
    trips = transpose(step.head_dim, step.n // TRIP_KEYS)
    if joins:
        trip = transpose(step.head_dim, 1)
        text = join.join([trip.text.removesuffix(fence_proxy().text)] * (step.n // TRIP_KEYS))
        trips = Body(text, trip.declares) + fence_proxy()
    hand_over = (
        "bar.sync 13, 128;\nshl.b32 %at, %v_slot, 3;\nadd.u32 %at, %at, %bars;\n"
        f"@%first mbarrier.arrive.shared::cta.b64 _, [%at+{8 * V}];\nadd.u32 %step, %step, 1;\n"
    )
    return Body(load) + trips + Body(hand_over + mark)


def _producer(part: Part, text: Body) -> Body:
    declares = _REGISTERS + ".reg .b32 %to;\n.reg .pred %old;\n"
    return Body(f"setmaxnreg.dec.sync.aligned.u32 {_registers(part)[0]};\n", declares) + text


def consumer_step() -> Iterator[Experiment]:
    """Twice eight steps of all consumers, with and without turns, the second steady. "phases": see :func:`consume`.

    e4m3 also with V transposed by the producer, see :func:`_transposed`.
    """
    for dtype, n, head_dim, most in SIZES:
        step = Step(dtype, n, head_dim)
        for order in ("serial", "overlap"):
            for consumers in range(1, most + 1):
                for pingpong in (False, True) if consumers > 1 else (False,):
                    parts = [Part(i, consumers, order, pingpong) for i in range(consumers)]
                    yield _steps(step, parts, "whole")
                    if dtype == "e4m3":
                        yield _steps(step, parts, "whole", transposes=True)
                        yield _steps(step, parts, "whole", transposes=True, joins=True)
                    if order == "overlap" and (pingpong or consumers == 1):
                        yield _steps(step, parts, "phases")


def _steps(
    step: Step, parts: list[Part], stamps: Literal["whole", "phases"], *, transposes: bool = False, joins: bool = False
) -> Experiment:
    bodies = []
    count = 3 if stamps == "whole" else 2 * STEPS * PHASES
    for part in parts:
        if stamps == "whole":
            steps = repeat(stamp() + repeat(Body(consume(step, part)), STEPS), 2) + stamp()
        else:
            steps = repeat(Body(consume(step, part, stamped=True)), 2 * STEPS)
        bodies.append(_consumer(step, part, Body(_first(step, part)) + steps))
    part = parts[0]
    one = _transposed(step, part, joins=joins) if transposes else _loads(step, part)
    bodies.append(_producer(part, repeat(one, 2 * STEPS + 1) + stamp()))
    last = 1 + PRODUCER_PHASES * (2 * STEPS + 1) * joins
    parameters = step.parameters | {
        "schedule": part.order,
        "pingpong": part.pingpong,
        "stamps": stamps,
        "warpgroups": part.consumers,
    }
    if transposes:
        parameters |= {"transposes": True, "joins": joins}
    return _of(parameters, bodies, [count] * len(parts) + [last], "consumer_step")


def _of(parameters: dict, bodies: list[Body], stamps: list[int], name: str) -> Experiment:
    return one_cta(name, parameters, bodies, MBARRIERS, stamps=stamps)


def consumer_tile() -> Iterator[Experiment]:
    """Tiles of several blocks in sequence, overlapped and with turns: first block, steps, last P V, O to global memory.

    A stamp at the start of every tile and at the end.
    """
    for dtype, n, head_dim, consumers in TILE_SIZES:
        step = Step(dtype, n, head_dim)
        size = 64 * head_dim * 2
        parts = [Part(i, consumers, "overlap", True) for i in range(consumers)]
        for blocks in (4, 12):
            bodies = []
            for part in parts:
                wait_q = f"and.b32 %at, %tile, 1;\n{_wait(f'%bars+{8 * Q}', '%at')}"
                last = (
                    "sub.u32 %at, %step, 1;\n"
                    + _place("v", "%at")
                    + _wait_full("v", V)
                    + _turn(part, take=True)
                    + _sum(step)
                    + _turn(part, take=False)
                    + wgmma_wait(0).text
                    + _hand_back("v", 10, consumers)
                    + normalise(head_dim)
                    + fence_proxy().text
                    + f"bar.sync {1 + part.index}, 128;\n"
                    + bulk_store_wait(".read").text
                    + bulk_store("%area", size).text
                    + f"bar.arrive 12, {128 * (consumers + 1)};\nadd.u32 %tile, %tile, 1;\n"
                )
                text = (
                    stamp()
                    + Body(wait_q + _first(step, part))
                    + repeat(Body(consume(step, part)), blocks - 1)
                    + Body(last)
                )
                declares = "mov.b32 %tile, %zero;\n" + output_setup(size)
                bodies.append(_consumer(step, part, repeat(text, TILES) + stamp(), declares=declares))
            load_q = (
                f"setp.ge.u32 %old, %tile, 1;\n@%old bar.sync 12, {128 * (consumers + 1)};\nadd.u32 %tile, %tile, 1;\n"
                f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars+{8 * Q}], {size};\n"
                f"@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%copies], [%from], "
                f"{size}, [%bars+{8 * Q}];\n"
            )
            loads = repeat(Body(load_q) + repeat(_loads(step, parts[0]), blocks), TILES)
            loads = Body("mov.b32 %tile, %zero;\n") + loads
            parameters = step.parameters | {"blocks": blocks, "tiles": TILES, "warpgroups": consumers}
            bodies.append(_producer(parts[0], loads + stamp()))
            yield _of(parameters, bodies, [TILES + 1] * consumers + [1], "consumer_tile")


def steps() -> Iterator[Experiment]:
    """All of them."""
    yield from consumer_step()
    yield from consumer_tile()
