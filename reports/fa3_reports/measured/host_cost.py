"""What a call costs on the host, before the GPU does anything: ours beside its peers, in the situations of callers.

Every call is timed by itself and the GPU is waited for between groups of calls, so that no queue fills. Kernels take
turns group by group, as a host's clock and load change from second to second. Problems are small: the GPU is done with
one before the next is launched.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func
from fa3_reports.measured.host_rows import Cost, check, code_keys
from fa3verify.files import markdown_table, write_text
from fa3verify.known import launches
from fa3verify.known.libraries import Unsupported

CALLS = 400
GROUP = 20
WARM_UP = 40
HEADS = 16
HEADS_KV = 16
HEAD_DIM = 128
SHAPE = (1, 256, HEADS, HEAD_DIM)
SITUATIONS = {
    "batched": "fresh tensors at every call",
    "decode": "one query, one key more at every call",
    "varlen": "lengths never seen before, on the GPU",
    "training": "forward and backward, fresh tensors",
    "compiled": "under torch.compile, fresh tensors",
    "graph": "a CUDA graph of one call, replayed",
}
Call = Callable[[int], Any]


class CalledKernel(NamedTuple):
    """How a kernel is called, None where it does not offer it; ``pinned`` holds its choices while it is timed."""

    name: str
    batched: Callable[..., Any]
    varlen: Callable[..., Any] | None
    pinned: Callable[[], AbstractContextManager[Any]] = nullcontext
    has_gradient: bool = True


def _tensors(count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def _operands() -> list[tuple[torch.Tensor, ...]]:
    """Return q, k and v of every call."""
    return list(zip(*(_tensors(CALLS + WARM_UP, *SHAPE) for _ in "qkv"), strict=True))


def _fresh(kernel: CalledKernel) -> Call:
    drawn = _operands()
    return lambda i: kernel.batched(*drawn[i % len(drawn)])


def _decode(kernel: CalledKernel) -> Call:
    (q,), (k,), (v,) = _tensors(1, 4, 1, HEADS, HEAD_DIM), *(_tensors(1, 4, 4096, HEADS_KV, HEAD_DIM) for _ in "kv")
    return lambda i: kernel.batched(q, k[:, : 1000 + i], v[:, : 1000 + i])


def _varlen(kernel: CalledKernel) -> Call | None:
    if kernel.varlen is None:
        return None
    call = kernel.varlen
    generator = torch.Generator().manual_seed(0)
    x, k, v = (_tensors(1, 4096, HEADS, HEAD_DIM)[0] for _ in "qkv")
    drawn = []
    for _ in range(CALLS + WARM_UP):
        lengths = torch.randint(1, 500, (8,), generator=generator)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
        drawn.append((int(starts[-1]), starts.cuda(), int(lengths.max())))

    def run(i: int) -> Any:
        total, starts, longest = drawn[i % len(drawn)]
        return call(x[:total], k[:total], v[:total], starts, starts, longest, longest)

    return run


def _training(kernel: CalledKernel) -> Call | None:
    if not kernel.has_gradient:
        return None
    drawn = _operands()
    (dout,) = _tensors(1, *SHAPE)

    def run(i: int) -> None:
        operands = [x.detach().requires_grad_() for x in drawn[i % len(drawn)]]
        with torch.enable_grad():
            kernel.batched(*operands).backward(dout)

    return run


def _compiled(kernel: CalledKernel) -> Call:
    function = torch.compile(lambda q, k, v: kernel.batched(q, k, v), dynamic=False)
    drawn = _operands()
    return lambda i: function(*drawn[i % len(drawn)])


def _graph(kernel: CalledKernel) -> Call:
    q, k, v = (_tensors(1, *SHAPE)[0] for _ in "qkv")
    kernel.batched(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.batched(q, k, v)
    return lambda i: graph.replay()


_MAKE: dict[str, Callable[[CalledKernel], Call | None]] = {
    "batched": _fresh,
    "decode": _decode,
    "varlen": _varlen,
    "training": _training,
    "compiled": _compiled,
    "graph": _graph,
}


def _microseconds(calls: Sequence[tuple[CalledKernel, Call]]) -> list[list[float]]:
    """Return the microseconds of the calls of each kernel."""
    for kernel, call in calls:
        with kernel.pinned():
            for i in range(WARM_UP):
                call(i)
    found: list[list[float]] = [[] for _ in calls]
    for first in range(WARM_UP, WARM_UP + CALLS, GROUP):
        for (kernel, call), times in zip(calls, found, strict=True):
            torch.cuda.synchronize()
            with kernel.pinned():
                for i in range(first, first + GROUP):
                    start = time.perf_counter_ns()
                    call(i)
                    times.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return found


def ours() -> CalledKernel:
    """Our functions, as a caller imports them."""
    return CalledKernel("gluon", flash_attn_func, flash_attn_varlen_func)


def flash3() -> CalledKernel:
    """Official FlashAttention-3's operator, called without its Python interface; Unsupported where it is absent."""
    launches.loaded("flash3")
    forward = torch.ops.fa3_fwd.fwd

    def varlen(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, longest_q: int, longest_k: int) -> Any:
        lengths = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        return forward(q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, num_splits=1, **lengths)

    return CalledKernel("flash3", lambda q, k, v: forward(q, k, v, num_splits=1), varlen, has_gradient=False)


def sdpa() -> CalledKernel:
    """torch's SDPA on its FlashAttention-2 backend, which takes (batch, nheads, seqlen, head_dim) views.

    Left alone, torch chooses a backend by version and shape, and one that plans every new shape anew makes a decoding
    loop a thousand times as dear.
    """

    def batched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return CalledKernel("torch.sdpa (flash)", batched, None, partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION]))


def measure(kernels: Sequence[CalledKernel]) -> Iterator[Cost]:
    """Measure all situations of all kernels; what a kernel does not offer has no row."""
    with torch.no_grad():
        for situation, make in _MAKE.items():
            calls = []
            for kernel in kernels:
                with kernel.pinned():
                    call = make(kernel)
                if call is not None:
                    calls.append((kernel, call))
            for (kernel, _), times in zip(calls, _microseconds(calls), strict=True):
                found = sorted(times)
                yield Cost(situation, kernel.name, statistics.median(found), found[int(len(found) * 0.9)])


def write(out: Path, facts: dict[str, Any], tell: Callable[[str], None]) -> Path:
    """Measure ours, SDPA, and FlashAttention-3 where it loads; write ``host.csv``, ``host.md``, ``host_run.json``.

    Raises
    ------
    ValueError
        For a cost that cannot be believed, by :func:`fa3_reports.measured.host_rows.check`; nothing is written then.
    """
    kernels = [ours(), sdpa()]
    try:
        kernels.insert(1, flash3())
    except (Unsupported, OSError) as error:
        tell(f"flash3 is missing: {error}")
    costs = []
    for cost in measure(kernels):
        tell(f"{cost.situation} {cost.kernel} {cost.median_us:.1f} us")
        costs.append(cost)
    check(costs)
    lines = [",".join(Cost._fields), *(f"{c.situation},{c.kernel},{c.median_us:.2f},{c.p90_us:.2f}" for c in costs)]
    write_text(out / "host.csv", "\n".join(lines) + "\n")
    kept = {name: facts[name] for name in ("run", "version", "gpu", "driver", "python", "torch", "triton")}
    write_text(out / "host_run.json", json.dumps(kept | {"code_keys": code_keys()}, indent=1) + "\n")
    write_text(out / "host.md", markdown(costs, facts))
    return out / "host.md"


def markdown(costs: Sequence[Cost], facts: dict[str, Any]) -> str:
    """The table: a situation a row, a kernel a column."""
    names = list(dict.fromkeys(c.kernel for c in costs))
    found = {(c.situation, c.kernel): c for c in costs}
    lines = [
        f"# Host cost per call, microseconds ({facts['gpu']}, torch {facts['torch']})",
        "",
        f"Median of {CALLS} calls, 90th percentile in brackets; bf16, head_dim {HEAD_DIM}, {HEADS} heads. Official",
        "FlashAttention-3 is the wheel fa3-fwd, which computes no gradient, called at its operator; ours and SDPA are",
        "called at their functions. Its operator has no fake tensors: torch.compile leaves it out of the graph.",
        "",
    ]
    rows = []
    for situation, about in SITUATIONS.items():
        cells = [found.get((situation, name)) for name in names]
        texts = ["-" if c is None else f"{c.median_us:.1f} ({c.p90_us:.1f})" for c in cells]
        rows.append((f"{situation}: {about}", *texts))
    return "\n".join([*lines, *markdown_table(("situation", *names), rows)])
