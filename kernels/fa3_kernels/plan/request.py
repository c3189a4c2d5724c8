"""The request of a caller: operands, semantics and choices, checked once, here.

:mod:`fa3_kernels.gluon.launch` makes a request of every new kind of call, and :mod:`fa3_kernels.plan.plan` plans it.
:func:`request_for` makes that of a problem without tensors, for the audit and the simulator.
The problem checks its sizes (:mod:`fa3_reference.problem`), and the configuration the choices. The checks here read
shapes, strides and dtypes alone, so they hold for tensors of any library, and for those that stand for tensors while a
graph is traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from fa3_kernels.plan.call import Pages
from fa3_kernels.plan.choose import check_outputs, config_of, without_lengths
from fa3_kernels.plan.config import Config, OutDtype, require
from fa3_reference.problem import AttentionProblem, Dtype

DTYPES: dict[str, Dtype] = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
}  # by numpy's and torch's names
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TMA_BYTES = 16  # addresses and outer strides must be multiples of it
ONE_BLOCK = 1 << 30  # rows per block of a descale that holds for a whole sequence
ONE_PAGE = 1 << 30  # keys of a page that holds a whole sequence, in a cache without a page table
MAX_CACHE_ROWS = 0x7FFF0000  # that coordinates of the ragged view can name


class TensorLayout(NamedTuple):
    """A tensor as the checks see it; strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str = ""


class Semantics(NamedTuple):
    """Holds what is computed, with the fields of :class:`fa3_reference.problem.AttentionProblem`.

    A ``softmax_scale`` of None is 1 / sqrt(head_dim).
    """

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    attention_chunk: int = 0

    @classmethod
    def of(cls, problem: AttentionProblem) -> Semantics:
        """Return the semantics of a problem."""
        return cls(problem.causal, problem.window, problem.softcap, problem.softmax_scale, problem.attention_chunk)


class Choices(NamedTuple):
    """Says how it is computed. Bits depend on num_splits, tile and, for e4m3, on promotion_interval and out_dtype.

    Parameters
    ----------
    num_splits : int
        Parts into which the key blocks of every tile are cut, merged by a second kernel in ascending order; 0 chooses
        from the shape.
    pack_gqa : bool, optional
        Fold the query heads of a kv head into the rows of a tile; :func:`fa3_kernels.plan.choose.choose_pack_gqa` by
        default.
    pingpong : bool, optional
        Schedule only; by default what ships.
    intra_wg_overlap : bool
        Schedule only.
    warp_specialize : bool
        False is the kernel of the ablation: :func:`fa3_kernels.plan.choose.check_lockstep`.
    tile : (int, int), optional
        Query rows and keys of a tile, for experiments: :func:`fa3_kernels.plan.choose.check_tile`.
    promotion_interval : int, optional
        e4m3 only: keys that the tensor core sums before the sum is added to O in fp32. By default 128, or the keys of a
        smaller tile; 0 chains through the 13-bit accumulator.
    out_dtype : {"bf16", "fp16"}, optional
        e4m3 only: bf16 by default.
    gathers_pages : bool
        Copy pages row by row even where TMA could copy them: keys may then begin inside a page.
    stamps : int
        Steps per CTA of which an instrumented kernel keeps a timeline (:mod:`fa3_kernels.plan.stamps`).
    sm_margin : int
        Multiprocessors that the launch leaves to others. Bits depend on it where ``num_splits`` is 0.
    """

    num_splits: int = 1
    pack_gqa: bool | None = None
    pingpong: bool | None = None
    intra_wg_overlap: bool = True
    warp_specialize: bool = True
    tile: tuple[int, int] | None = None
    promotion_interval: int | None = None
    out_dtype: OutDtype | None = None
    gathers_pages: bool = False
    stamps: int = 0
    sm_margin: int = 0

    def config(self, problem: AttentionProblem, num_sms: int) -> Config:
        """Return the configuration of the kernel; ValueError for a choice that no kernel is compiled for."""
        return config_of(problem, num_sms=num_sms, **self.keywords(problem.dtype))

    def keywords(self, dtype: Dtype) -> dict[str, Any]:
        """Return the choices as :func:`fa3_kernels.plan.choose.config_of` takes them.

        ValueError for a choice of e4m3 kernels with other operands.
        """
        keywords = self._asdict()
        del keywords["stamps"], keywords["gathers_pages"], keywords["sm_margin"]
        require(self.sm_margin >= 0, f"sm_margin must be >= 0, got {self.sm_margin}")
        for_e4m3 = {name: keywords.pop(name) for name in ("promotion_interval", "out_dtype")}
        given = {name: value for name, value in for_e4m3.items() if value is not None}
        require(not given or dtype == "e4m3", f"{' and '.join(given)} is for e4m3 operands, got dtype {dtype}")
        return keywords | given


class DescaleLayout(NamedTuple):
    """Says where a kernel finds the descales of one operand: strides of sequence, head and block, in elements."""

    strides: tuple[int, int, int]
    repeats: tuple[int, int]  # how often heads and blocks of the caller's tensor are repeated for the kernel


@dataclass(frozen=True, slots=True)
class Request:
    """A checked launch. For packed sequences every length in ``problem`` is the longest that there may be."""

    problem: AttentionProblem
    choices: Choices
    descales: tuple[DescaleLayout | None, DescaleLayout | None, DescaleLayout | None] = (None, None, None)
    descale_blocks: tuple[int, int, int] = (0, 0, 0)
    pages: Pages | None = None
    has_sinks: bool = False

    def with_keys(self, seqlen_k: int) -> Request:
        """Return the same launch over another number of keys, which the checks would treat alike."""
        return replace(self, problem=replace(self.problem, seqlen_k=seqlen_k))

    @property
    def block_descales(self) -> bool:
        """Tell whether descales of K or V differ by key tile."""
        return any(x is not None and rows for x, rows in zip(self.descales[1:], self.descale_blocks[1:], strict=True))


def check_operands(
    q: TensorLayout, k: TensorLayout, v: TensorLayout, *, is_packed: bool, is_paged: bool = False
) -> None:
    """Raise ValueError for tensors that the kernels cannot read."""
    operands = (q, k, v)
    ranks = (3 if is_packed else 4, *(3 if is_packed and not is_paged else 4,) * 2)
    devices = sorted({x.device for x in operands})
    require(
        len(devices) == 1 and devices[0].startswith("cuda"),
        f"q, k and v must be on one Hopper GPU, got {', '.join(devices)}",
    )
    axes = "(total, nheads, head_dim)" if is_packed else "(batch, seqlen, nheads, head_dim)"
    if is_paged:
        axes += ", k and v (pages, page_size, nheads_kv, head_dim)"
    shapes = ", ".join(str(tuple(x.shape)) for x in operands)
    require(
        all(len(x.shape) == rank for x, rank in zip(operands, ranks, strict=True)),
        f"q, k and v must be {axes}, got {shapes}",
    )
    require(
        q.dtype in DTYPES and k.dtype == v.dtype == q.dtype,
        f"q, k and v must share float16, bfloat16 or float8_e4m3fn, got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    require(k.shape[:-1] == v.shape[:-1], f"k and v must have one shape but for head_dim, got {shapes}")
    fits = q.shape[-1] == k.shape[-1] and (is_packed or q.shape[0] == k.shape[0])
    require(fits, f"k and v must fit q, got {shapes}")
    multiple = TMA_BYTES // (1 if q.dtype == "float8_e4m3fn" else 2)
    for name, x in zip("qkv", operands, strict=True):
        if all(x.shape) and x.shape[-1] % multiple == 0:  # the strides of an empty tensor mean nothing
            require(x.strides[-1] == 1, f"the last dimension of {name} must be contiguous, got strides {x.strides}")
            is_aligned = not any(n % multiple for n in x.strides[:-1])
            require(is_aligned, f"strides of {name} must be multiples of 16 bytes (TMA), got {x.strides} elements")


def pages_of(k: TensorLayout, v: TensorLayout, keys: int) -> Pages:
    """Return how a cache lies in memory.

    Parameters
    ----------
    k, v : (pages, page_size, nheads_kv, head_dim)
    keys : int
        Keys of a page: page_size, or :data:`ONE_PAGE`.

    Raises
    ------
    ValueError
        For a cache whose rows the kernels cannot address.
    """
    require(all(k.shape) and all(v.shape), f"a cache must hold a row, got {k.shape} and {v.shape}")
    require(keys in (k.shape[1], ONE_PAGE), f"page_size must be that of k, {k.shape[1]}, got {keys}")
    (rows, rest), of_v = (divmod(x.strides[0], max(1, x.strides[1])) for x in (k, v))
    require(
        rest == 0 and of_v == (rows, 0) and rows >= k.shape[1],
        f"pages of k and v must lie a whole number of rows apart, of both as many, got strides {k.strides} and "
        f"{v.strides}",
    )
    require(k.shape[0] * rows < MAX_CACHE_ROWS, f"a cache may have {MAX_CACHE_ROWS} rows, got {k.shape[0]} x {rows}")
    return Pages(keys, rows, k.strides[1:3], v.strides[1:3])


def request_of(
    operands: tuple[TensorLayout, ...],
    semantics: Semantics,
    choices: Choices,
    *,
    descales: tuple[TensorLayout | None, ...] = (None, None, None),
    descale_blocks: tuple[int, int, int] = (0, 0, 0),
    packed: tuple[int, ...] | None = None,
    page_size: int = 0,
    has_sinks: bool = False,
) -> Request:
    """Check a launch and return it as a request.

    Parameters
    ----------
    operands : q, k, v
    semantics, choices
    descales : of q, k and v; float32 (batch, heads) or (batch, heads, blocks), or None for 1
        Heads are those of the operand; those of q may be kv heads, whose descale then holds for their group.
    descale_blocks : (int, int, int)
        Rows per block of q, k and v, counted from the start of each sequence; 0 is one block.
    packed : (int, int, int), optional
        Sequences, longest queries and longest keys of packed operands.
    page_size : int
        Keys of a page, where k and v are (pages, page_size, nheads_kv, head_dim) and queries are packed;
        :data:`ONE_PAGE` where each sequence has one page, and 0 without a cache.
    has_sinks : bool
        Whether every query head has a sink.

    Raises
    ------
    ValueError
        With the value and the rule, for anything the kernels do not take.
    """
    q, k, v = operands
    check_operands(q, k, v, is_packed=packed is not None, is_paged=page_size != 0)
    rest: dict[str, Any] = {"head_dim_v": v.shape[-1], "dtype": DTYPES[q.dtype]} | semantics._asdict()
    if packed:
        batch, max_q, max_k = packed
        require(batch > 0 and max_q > 0, f"at least one sequence with a query is needed, got {packed}")
        sizes = {"nheads": q.shape[1], "nheads_kv": k.shape[-2], "head_dim": q.shape[2]}
        problem = without_lengths(AttentionProblem.varlen((max_q,) * batch, (max_k,) * batch, **sizes, **rest))
        lengths = (max_q, max_k, max_k)
    else:
        problem = AttentionProblem(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], **rest)
        lengths = (problem.seqlen_q, problem.seqlen_k, problem.seqlen_k)
    config = choices.config(problem, 1)
    layouts = _descale_layouts(problem, config.tile_n, descales, descale_blocks, lengths, q.device)
    require(packed is not None or not (page_size or has_sinks), "pages and sinks are for packed queries")
    pages = None
    if page_size:
        pages = pages_of(k, v, page_size)._replace(gathers=choices.gathers_pages)
        require(
            not any(descale_blocks),
            f"descales of a cache are per sequence and head, got descale_blocks {descale_blocks}",
        )
    require(choices.warp_specialize or not choices.stamps, "stamps are taken by warp-specialised kernels alone")
    rows = problem.nheads * (q.shape[0] if packed else problem.batch * problem.seqlen_q)
    check_outputs(rows, config.head_dim, choices.num_splits)
    return Request(problem, choices, layouts, descale_blocks, pages, has_sinks)


def contiguous(shape: tuple[int, ...], dtype: str) -> TensorLayout:
    """Return the layout of a contiguous tensor on a GPU."""
    strides = (prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorLayout(shape, tuple(strides), dtype, "cuda:0")


def tensor_shapes(problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of q, k, v and out by name; a cache has as many pages, or rows, as the longest sequences
    need.
    """
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape, "out": problem.out_shape}
    if problem.cache is None:
        return shapes
    size = problem.cache.page_size or max(1, problem.seqlen_k)
    cache = (problem.batch * max(1, -(-problem.seqlen_k // size)), size, problem.nheads_kv)
    return shapes | {"k": (*cache, problem.head_dim), "v": (*cache, problem.head_dim_v)}


def request_for(
    problem: AttentionProblem, choices: Choices, descale_blocks: tuple[int, int, int] | None = None
) -> Request:
    """Return the checked request of a call of a problem, with contiguous operands.

    ``descale_blocks`` None is a call without descales. ValueError as of :func:`request_of`.
    """
    lengths = (problem.seqlen_q, problem.seqlen_k, problem.seqlen_k)
    descales: tuple[TensorLayout | None, ...] = (None, None, None)
    if descale_blocks is not None:
        heads = (problem.nheads, problem.nheads_kv, problem.nheads_kv)
        counts = [max(1, -(-n // rows)) if rows else 1 for n, rows in zip(lengths, descale_blocks, strict=True)]
        descales = tuple(contiguous((problem.batch, h, n), "float32") for h, n in zip(heads, counts, strict=True))
    shapes = tensor_shapes(problem)
    return request_of(
        tuple(contiguous(shapes[name], NAMES[problem.dtype]) for name in "qkv"),
        Semantics.of(problem),
        choices,
        descales=descales,
        descale_blocks=descale_blocks or (0, 0, 0),
        packed=(problem.batch, *lengths[:2]) if problem.is_varlen else None,
        page_size=problem.cache.page_size or ONE_PAGE if problem.cache else 0,
        has_sinks=problem.sinks,
    )


def _descale_layouts(
    problem: AttentionProblem,
    tile_n: int,
    descales: tuple[TensorLayout | None, ...],
    blocks: tuple[int, int, int],
    lengths: tuple[int, int, int],
    device: str,
) -> Any:
    """Check the descales and return, for q, k and v, where a kernel finds the factor of a sequence, head and block.

    ``lengths`` are the longest ones of q, k and v. None stands for an operand without descales.
    """
    require(
        len(blocks) == 3 and all(isinstance(n, int) and n >= 0 for n in blocks),
        f"descale_blocks must be three integers >= 0, for q, k and v, got {blocks!r}",
    )
    layouts: list[DescaleLayout | None] = []
    for name, x, rows, length in zip("qkv", descales, blocks, lengths, strict=True):
        if x is None:
            require(rows == 0, f"descale_blocks names blocks of {rows} rows for {name}_descale, which is None")
            layouts.append(None)
            continue
        name, heads = f"{name}_descale", problem.nheads if name == "q" else problem.nheads_kv
        require(problem.dtype == "e4m3", f"{name} is for float8_e4m3fn operands, got {problem.dtype}")
        require(
            x.dtype == "float32" and x.device == device,
            f"{name} must be float32 on {device}, got {x.dtype} on {x.device}",
        )
        count = max(1, -(-length // rows)) if rows else 1
        allowed: set[tuple[int, ...]] = {(problem.batch, n, count) for n in (heads, problem.nheads_kv)}
        if not rows:
            allowed.add((problem.batch, problem.nheads_kv))
        shape = f"({problem.batch}, {problem.nheads_kv}{', blocks' if rows else ''})"
        counted = f" with {count} blocks of {rows} rows" if rows else ""
        require(tuple(x.shape) in allowed, f"{name} must be {shape} (batch, nheads_kv){counted}, got {tuple(x.shape)}")
        strides = (*x.strides, 0)[:3]
        repeats = (heads // x.shape[1], 1)
        if name != "q_descale" and rows:
            require(rows % tile_n == 0, f"{name} blocks must be whole key tiles of {tile_n} rows, got {rows}")
            repeats = (1, rows // tile_n)
        if repeats != (1, 1):  # a contiguous copy of the caller's tensor
            strides = (heads * count * repeats[1], count * repeats[1], 1)
        layouts.append(DescaleLayout((strides[0], strides[1], strides[2] if rows else 0), repeats))
    return tuple(layouts)
