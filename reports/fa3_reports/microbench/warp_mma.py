"""The rate of ``mma.sync`` as a fraction of wgmma's, with operands that stay in registers and with ldmatrix."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

from fa3_reports.microbench.experiment import Experiment, one_cta, timed
from fa3_reports.microbench.ptx import COPIES, Body, keep_accumulators, repeat

FLOPS = 2 * 16 * 8 * 16  # of an instruction
PEAK = 4096  # FLOP a cycle of an SM's tensor cores: wgmma with 16-bit operands
COUNT = 2048  # instructions of a warp
UNROLLED = 64
CHAINS = (1, 2, 4, 8, 16)
# Rows and columns of a warp's tile, and whether its rows stay in registers, as an attention kernel's do.
TILES = ((32, 64, False), (64, 64, False), (64, 128, False), (16, 64, True), (32, 64, True))
SETS = 2  # of fragments: one is loaded while the other is used
LOADED = 16  # rows or columns of one ldmatrix of four matrices


def _mma(accumulator: int, a: str, b: tuple[str, str]) -> str:
    sums = ", ".join(f"%acc{4 * accumulator + i}" for i in range(4))
    rows = ", ".join(f"{a}{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{sums}}}, {{{rows}}}, {{{', '.join(b)}}}, {{{sums}}};\n"
    )


def _load(target: str, place: int) -> str:
    registers = ", ".join(f"{target}{i}" for i in range(4))
    return f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{registers}}}, [%mine+{512 * place}];\n"


def _declares(accumulators: int, fragments: dict[str, int]) -> str:
    text = f".reg .f32 %acc<{4 * accumulators}>;\n.reg .b32 %mine;\n"
    text += f"shl.b32 %mine, %id, 4;\nadd.u32 %mine, %mine, %base;\nadd.u32 %mine, %mine, {COPIES};\n"
    text += "".join(f"mov.f32 %acc{i}, 0f00000000;\n" for i in range(4 * accumulators))
    for name, count in fragments.items():
        text += f".reg .b32 {name}<{count}>;\n"
        text += "".join(f"add.u32 {name}{i}, %id, {i};\n" for i in range(count))
    return text


def in_registers(chains: int) -> Body:
    """Return :data:`UNROLLED` instructions on so many accumulators in turn; no operand is loaded."""
    text = "".join(_mma(i % chains, "%a", (f"%b{2 * (i % 4)}", f"%b{2 * (i % 4) + 1}")) for i in range(UNROLLED))
    return Body(text, _declares(chains, {"%a": 4, "%b": 8}))


def tile_steps(rows: int, columns: int, *, has_rows: bool) -> Body:
    """Return two steps of 16 over k of a warp's tile; fragments are loaded a step ahead.

    With ``has_rows`` those of the rows stay where they are.
    """
    tall, wide = rows // LOADED, columns // LOADED
    text = ""
    for step in range(SETS):
        other = 1 - step
        text += f"xor.b32 %mine, %mine, {32768 >> step};\n"
        if not has_rows:
            text += "".join(_load(f"%a{other}_{i}_", i) for i in range(tall))
        text += "".join(_load(f"%b{other}_{j}_", tall + j) for j in range(wide))
        for j, i, half in product(range(wide), range(tall), range(2)):
            a = f"%a{0 if has_rows else step}_{i}_"
            b = (f"%b{step}_{j}_{2 * half}", f"%b{step}_{j}_{2 * half + 1}")
            text += _mma(i * 2 * wide + 2 * j + half, a, b)
    names = [f"%a{s}_{i}_" for s in range(1 if has_rows else SETS) for i in range(tall)]
    names += [f"%b{s}_{j}_" for s in range(SETS) for j in range(wide)]
    return Body(text, _declares(2 * tall * wide, dict.fromkeys(names, 4)))


def from_registers() -> Iterator[Experiment]:
    """By one to four warps of each scheduler."""
    for chains, warpgroups in product(CHAINS, (1, 2, 3, 4)):
        body = timed(repeat(in_registers(chains), COUNT // UNROLLED)) + keep_accumulators(8 * chains)
        parameters = {"chains": chains, "count": COUNT, "warpgroups": warpgroups}
        yield one_cta("mma_sync", parameters, [body] * warpgroups, stamps=[2] * warpgroups)


def with_ldmatrix() -> Iterator[Experiment]:
    """By one and by two warps of each scheduler, every operand of a tile loaded from shared memory."""
    for (rows, columns, has_rows), warpgroups in product(TILES, (1, 2)):
        steps = tile_steps(rows, columns, has_rows=has_rows)
        per_pass = steps.text.count("mma.sync")
        body = timed(repeat(steps, COUNT // per_pass)) + keep_accumulators(rows * columns // 16)
        parameters = {"rows": rows, "columns": columns, "has_rows": has_rows, "count": COUNT, "warpgroups": warpgroups}
        yield one_cta("mma_sync_ldmatrix", parameters, [body] * warpgroups, stamps=[2] * warpgroups)


def warp_mma() -> Iterator[Experiment]:
    """All of them."""
    return chain(from_registers(), with_ldmatrix())
