"""PTX of a warpgroup's online-softmax step: 64 rows by ``n`` keys, of which a lane holds n / 4 scores of two rows each.

Scores are the accumulators of Q K^T (``%s``), probabilities are packed into the operand A of P V (``%p``) and the
output is ``%o``. The statements are straight-line; ptxas schedules them. Every value is carried from one step to the
next so that nothing can be moved out of a loop, and no instruction is there for that alone: a step without GEMMs takes
the words of P and the exponentials of the step before as scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fa3_reports.microbench.ptx import K_STEP, OPERANDS, TYPES, Body, matrix_descriptor

Dtype = Literal["fp16", "e4m3"]
ROWS = (0, 1)  # of a lane


@dataclass(frozen=True, slots=True)
class Step:
    """One key block of one warpgroup.

    ``order``: "serial", one running maximum and one running sum per row, as FlashAttention-3 writes it; "tree", maxima
    by a balanced tree, sums of pairs added one after another. Maxima are of floats for fp16 and of integers, three at a
    time, for e4m3.
    """

    dtype: Dtype
    n: int  # keys
    head_dim: int
    order: Literal["serial", "tree"] = "serial"

    @property
    def scores(self) -> int:
        """Scores of a lane."""
        return self.n // 2

    @property
    def outputs(self) -> int:
        """Accumulators of O of a lane."""
        return self.head_dim // 2

    @property
    def words(self) -> int:
        """32-bit words of P of a lane."""
        return self.n // (4 if self.dtype == "fp16" else 8)

    @property
    def parameters(self) -> dict:
        return {"dtype": self.dtype, "n": self.n, "head_dim": self.head_dim, "order": self.order}


def setup(step: Step) -> str:
    """Registers of a step, every one a function of the thread's number."""
    lines = [
        f".reg .b32 %s<{step.scores}>, %o<{step.outputs}>, %p<{step.words}>, "
        f"%t<{4 * step.n}>, %new<2>, %old<2>, %base<2>;",
        ".reg .b32 %before<2>, %alpha<2>, %sum<2>, %factor, %part;\n.reg .b16 %low, %high;\n"
        ".reg .b64 %desc_q, %desc_k;",
        ".reg .pred %true, %false;\nsetp.eq.u32 %true, 0, 0;\nsetp.ne.u32 %false, 0, 0;",
        f"mov.b64 %desc_q, {matrix_descriptor(OPERANDS)};\nmov.b64 %desc_k, {matrix_descriptor(OPERANDS + 16384)};",
        "cvt.rn.f32.u32 %factor, %id;\nadd.rn.f32 %factor, %factor, 0f3F000000;",
    ]
    for name, count in (("s", step.scores), ("o", step.outputs), ("p", step.words)):
        lines += [f"add.rn.f32 %{name}{i}, %factor, {_float(i + 1)};" for i in range(count)]
    for r in ROWS:
        lines += [f"mul.rn.f32 %{name}{r}, %factor, {_float(r + 3)};" for name in ("old", "base", "sum", "alpha")]
    return "\n".join(lines) + "\n"


def _float(value: int) -> str:
    return f"0f{0x3F800000 + (value << 12):08X}"


def row(step: Step, r: int) -> list[str]:
    """Scores of row ``r`` of the lane's two, in the layout of the accumulators of wgmma."""
    return [f"%s{i + 2 * r + e}" for i in range(0, step.scores, 4) for e in (0, 1)]


def _temporaries() -> Iterator[str]:
    count = 0
    while True:
        yield f"%t{count}"
        count += 1


def _larger(operands: list[str], target: str, dtype: str) -> str:
    """Maximum of two floats, or of two or three integers."""
    if dtype == "fp16":
        return f"max.f32 {target}, {operands[0]}, {operands[1]};\n"
    if len(operands) == 2:
        return f"max.s32 {target}, {operands[0]}, {operands[1]};\n"
    return f"max.s32 %part, {operands[0]}, {operands[1]};\nmax.s32 {target}, %part, {operands[2]};\n"


def _fold(step: Step, r: int, fresh: Iterator[str]) -> Iterator[str]:
    """Largest score of a row and the running maximum before, into ``%new``."""
    values = [f"%old{r}", *row(step, r)]
    arity = 2 if step.dtype == "fp16" else 3
    if step.order == "serial":
        yield f"mov.b32 %new{r}, {values[0]};\n"
        for i in range(1, len(values), arity - 1):
            yield _larger([f"%new{r}", *values[i : i + arity - 1]], f"%new{r}", step.dtype)
        return
    values = [*values[1:], values[0]]  # the running maximum last
    while len(values) > 1:
        merged = []
        for i in range(0, len(values), arity):
            some = values[i : i + arity]
            if len(some) == 1:
                merged += some
                continue
            target = f"%new{r}" if len(values) <= arity else next(fresh)
            yield _larger(some, target, step.dtype)
            merged.append(target)
        values = merged


def _folded(step: Step) -> list[str]:
    fresh = _temporaries()
    return [line for pair in zip(*(_fold(step, r, fresh) for r in ROWS), strict=True) for line in pair]


def fold(step: Step) -> str:
    """Running maxima of two rows over the lane's own scores."""
    return "".join(_folded(step)) + "".join(f"mov.b32 %old{r}, %new{r};\n" for r in ROWS)


def maxima(step: Step) -> str:
    """New maxima of two rows: own scores, the quad's by two shuffles, and the multiple that exponents start from."""
    lines = _folded(step)
    for lane in (1, 2):
        for r in ROWS:
            lines.append(f"shfl.sync.bfly.b32 %t{r}, %new{r}, {lane}, 31, 0xffffffff;\n")
        for r in ROWS:
            lines.append(_larger([f"%new{r}", f"%t{r}"], f"%new{r}", step.dtype))
    for r in ROWS:
        lines.append(f"mov.b32 %before{r}, %base{r};\nmov.b32 %old{r}, %new{r};\n")
        lines.append(f"mul.rn.f32 %base{r}, %new{r}, %factor;\n")
    return "".join(lines)


def exponentials(step: Step) -> str:
    """alpha of two rows; one multiply-add and one exponential per score, in place; row sums of the lane."""
    lines = []
    for r in ROWS:
        lines.append(f"sub.rn.f32 %alpha{r}, %before{r}, %base{r};\nex2.approx.ftz.f32 %alpha{r}, %alpha{r};\n")
        lines.append(f"neg.f32 %t{r}, %base{r};\n")
    for i in range(step.scores):
        lines.append(f"fma.rn.f32 %s{i}, %s{i}, %factor, %t{i // 2 % 2};\nex2.approx.ftz.f32 %s{i}, %s{i};\n")
    for r in ROWS:
        values = row(step, r)
        if step.order == "serial":
            lines.append(f"fma.rn.f32 %sum{r}, %sum{r}, %alpha{r}, {values[0]};\n")
            lines += [f"add.rn.f32 %sum{r}, %sum{r}, {value};\n" for value in values[1:]]
            continue
        total = f"%t{2 + r}"
        lines.append(f"add.rn.f32 {total}, {values[0]}, {values[1]};\n")
        for i in range(2, len(values), 2):
            lines.append(f"add.rn.f32 %t{4 + r}, {values[i]}, {values[i + 1]};\n")
            lines.append(f"add.rn.f32 {total}, {total}, %t{4 + r};\n")
        lines.append(f"fma.rn.f32 %sum{r}, %sum{r}, %alpha{r}, {total};\n")
    return "".join(lines)


def convert(step: Step, *, carry: bool) -> str:
    """Words of P; with ``carry`` each becomes a score of the next step, in place of the first exponential it holds."""
    lines = []
    for word in range(step.words):
        if step.dtype == "fp16":
            first = 2 * word
            lines.append(f"cvt.rn.f16x2.f32 %p{word}, %s{first + 1}, %s{first};\n")
        else:
            first = 8 * (word // 2) + 2 * (word % 2)  # of one row, from two neighbouring groups of eight keys
            for half, start in (("low", first), ("high", first + 4)):
                lines.append(f"cvt.rn.satfinite.e4m3x2.f32 %{half}, %s{start + 1}, %s{start};\n")
            lines.append(f"mov.b32 %p{word}, {{%low, %high}};\n")
        if carry:
            lines.append(f"mov.b32 %s{first}, %p{word};\n")
    return "".join(lines)


def rescale(step: Step) -> str:
    """O times alpha."""
    return "".join(f"mul.rn.f32 %o{i}, %o{i}, %alpha{i // 2 % 2};\n" for i in range(step.outputs))


def qk(step: Step) -> str:
    """S = Q K^T, both in shared memory, as one group; not waited for."""
    scores = ", ".join(f"%s{i}" for i in range(step.scores))
    scale = "1, 1" if step.dtype == "e4m3" else "1, 1, 0, 0"
    count = step.head_dim // K_STEP[step.dtype]
    lines = [
        f"{_wgmma(step, step.n)} {{{scores}}}, %desc_q, %desc_k, {'%true' if i else '%false'}, {scale};\n"
        for i in range(count)
    ]
    return "wgmma.fence.sync.aligned;\n" + "".join(lines) + "wgmma.commit_group.sync.aligned;\n"


def pv(step: Step, count: int | None = None) -> str:
    """O += P V, P in registers, as a group of ``count`` (the keys' by default), words of P in turn; not waited for."""
    outputs = ", ".join(f"%o{i}" for i in range(step.outputs))
    scale = "1, 1" if step.dtype == "e4m3" else "1, 1, 0"
    lines = []
    for i in range(count or step.n // K_STEP[step.dtype]):
        words = ", ".join(f"%p{(4 * i + j) % step.words}" for j in range(4))
        lines.append(f"{_wgmma(step, step.head_dim)} {{{outputs}}}, {{{words}}}, %desc_k, %true, {scale};\n")
    return "wgmma.fence.sync.aligned;\n" + "".join(lines) + "wgmma.commit_group.sync.aligned;\n"


def _wgmma(step: Step, n: int) -> str:
    kind = TYPES[step.dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{K_STEP[step.dtype]}.f32.{kind}.{kind}"


def keep(step: Step, *, scores_only: bool = False) -> Body:
    """A never-taken store that keeps all that a step leaves alive, or only the scores."""
    values = [f"%s{i}" for i in range(step.scores)]
    if not scores_only:
        values += [f"%o{i}" for i in range(step.outputs)]
        values += [f"%p{i}" for i in range(step.words)]
        values += [f"%{name}{r}" for name in ("old", "base", "sum") for r in ROWS]
    fold = "".join(f"xor.b32 %part, %part, {value};\n" for value in values)
    never = "{ .reg .pred %never;\nsetp.eq.u32 %never, %part, 0x12345;\n@%never st.global.b32 [%out], %part;\n}\n"
    return Body("mov.b32 %part, %zero;\n" + fold + never, setup(step))
