"""Time attention over pages, ours beside the builds of FlashAttention-3 that serve: decoding, chunks and prompts.

    python reports/h200/serving/run.py OUT [LIBRARIES] [--warm I/N]

LIBRARIES holds vllm.so (``vllm_flash_attn/_vllm_fa3_C.abi3.so`` of vllm 0.33.0) and sgl.so (``flash_ops.abi3.so`` of
sglang-kernel 0.4.5). Every launch is timed in a CUDA graph of several, the peers in turn, and the host by calls that
nothing waits for. Writes OUT/serving.json and OUT/README.md. ``--warm I/N`` only compiles every N-th shape's kernels.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fa3_kernels.api import flash_attn_varlen_func, flash_attn_with_kvcache
from fa3_kernels.audit.evidence import evidence_facts

HEADS, HEAD_DIM = 32, 128
LIBRARIES = {"vllm": ("vllm.so", "_vllm_fa3_C"), "sglang": ("sgl.so", "sgl_kernel")}
TITLES = {"ours": "ours", "vllm": "vLLM's build", "sglang": "SGLang's build", "packed": "ours, keys in one piece"}
REPEATS, ROUNDS = 12, 7
Launch = Callable[[], Any]


class Shape(NamedTuple):
    """A call: sequences of ``keys`` keys each, unless ``is_ragged``, of which ``queries`` are asked for."""

    dtype: str
    batch: int
    queries: int
    keys: int
    heads_kv: int
    page_size: int
    is_ragged: bool = False


def shapes() -> list[Shape]:
    """Decoding of one and of four queries, ragged batches, chunks of prompts and prompts."""
    found = []
    for dtype in ("bfloat16", "float8_e4m3fn"):
        pages = (16, 64, 256)
        for batch, keys, page in product((1, 8, 64), (1024, 8192, 32768), pages):
            if batch * keys <= 64 * 8192:
                found.append(Shape(dtype, batch, 1, keys, 8, page))
        found += [Shape(dtype, 1, 1, 131072, 8, page) for page in pages]
        found += [Shape(dtype, batch, 4, keys, 8, 16) for batch, keys in ((1, 8192), (8, 8192), (64, 1024))]
        found += [Shape(dtype, batch, 1, 8192, 1, 16) for batch in (1, 8, 64)]  # one head of keys: MQA
        found += [Shape(dtype, 64, 1, 8192, 8, page, True) for page in pages]
        found += [Shape(dtype, 4, 4096, 4096, 8, page) for page in pages]
        found += [Shape(dtype, 1, 2048, 16384, 8, page) for page in (16, 256)]
    return found


class Call:
    """Operands of a shape on the GPU."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, shape.dtype)
        self.shape = shape
        entries = shape.keys // shape.page_size
        size = (shape.batch * entries, shape.page_size, shape.heads_kv, HEAD_DIM)
        self.k, self.v = (torch.randn(size, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in "kv")
        self.table = torch.randperm(size[0], device="cuda").int().view(shape.batch, entries)
        lengths = [shape.keys] * shape.batch
        if shape.is_ragged:
            drawn = torch.randint(1, shape.keys + 1, (shape.batch,), generator=torch.Generator().manual_seed(0))
            lengths = [shape.keys, *drawn.tolist()[1:]]
        self.lengths = lengths
        self.used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        size = (shape.batch, shape.queries, HEADS, HEAD_DIM)
        self.q = torch.randn(size, device="cuda", dtype=torch.bfloat16).to(dtype)
        self.cu_q = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32) * shape.queries
        self.cu_k = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        self.is_causal = shape.queries > 1

    @property
    def bytes(self) -> int:
        """Of the keys and values that are read."""
        return 2 * sum(self.lengths) * self.shape.heads_kv * HEAD_DIM * self.k.element_size()

    @property
    def flops(self) -> int:
        rows = self.shape.queries
        pairs = sum(rows * n - (rows * (rows - 1) // 2 if self.is_causal else 0) for n in self.lengths)
        return 4 * pairs * HEADS * HEAD_DIM

    def ours(self) -> Launch:
        options: dict[str, Any] = {"cache_seqlens": self.used, "page_table": self.table, "causal": self.is_causal}
        return lambda: flash_attn_with_kvcache(self.q, self.k, self.v, **options)

    def packed(self) -> Launch:
        q = self.q.flatten(0, 1)
        k, v = (x.flatten(0, 1)[: sum(self.lengths)] for x in (self.k, self.v))
        given = (self.cu_q, self.cu_k, self.shape.queries, self.shape.keys)
        return lambda: flash_attn_varlen_func(q, k, v, *given, causal=self.is_causal, num_splits=0)

    def of_library(self, operator: Any) -> Launch:
        given = {
            "q": self.q.flatten(0, 1),
            "k": self.k,
            "v": self.v,
            "cu_seqlens_q": self.cu_q,
            "seqused_k": self.used,
            "max_seqlen_q": self.shape.queries,
            "max_seqlen_k": self.shape.keys,
            "page_table": self.table,
            "softmax_scale": HEAD_DIM**-0.5,
            "is_causal": self.is_causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "attention_chunk": 0,
            "softcap": 0.0,
            "is_rotary_interleaved": True,
            "num_splits": 0,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
            "only_qv": False,
        }
        arguments = [given.get(x.name) for x in operator._schema.arguments]
        return lambda: operator(*arguments)


def libraries(folder: Path) -> dict[str, tuple[Any, str]]:
    """Load what there is, and return each operator with the start of its file's digest."""
    found = {}
    for name, (file, space) in LIBRARIES.items():
        if (folder / file).exists():
            torch.ops.load_library(str(folder / file))
            with (folder / file).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            found[name] = (getattr(torch.ops, space).fwd.default, digest[:12])
    return found


def graphs(launches: dict[str, Launch]) -> dict[str, torch.cuda.CUDAGraph]:
    """A graph of REPEATS launches of each."""
    found = {}
    for name, launch in launches.items():
        for _ in range(2):
            launch()
        torch.cuda.synchronize()
        found[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(found[name]):
            for _ in range(REPEATS):
                launch()
    return found


def on_gpu(launches: dict[str, Launch]) -> dict[str, float]:
    """Microseconds of a launch, the median of rounds in which each has its turn."""
    captured = graphs(launches)
    took: dict[str, list[float]] = {name: [] for name in launches}
    for i in range(ROUNDS + 1):
        for name, graph in captured.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            if i:  # the first round warms up
                took[name].append(first.elapsed_time(last) * 1e3 / REPEATS)
    return {name: round(statistics.median(x), 2) for name, x in took.items()}


def on_host(launch: Launch) -> float:
    """Microseconds that a call keeps the host, the median of 40 bursts of 10."""
    took = []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            launch()
        took.append((time.perf_counter() - start) * 1e5)
    return round(statistics.median(took), 1)


def of_host(operators: dict[str, tuple[Any, str]]) -> dict[str, float]:
    """Cost of the host of a short decoding call."""
    call = Call(Shape("bfloat16", 8, 1, 1024, 8, 16))
    launches = {"ours": call.ours(), "packed": call.packed()}
    launches |= {name: call.of_library(x) for name, (x, _) in operators.items()}
    for launch in launches.values():
        for _ in range(20):
            launch()
    return {name: on_host(launch) for name, launch in launches.items()}


def measured(shape: Shape, operators: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    call = Call(shape)
    launches = {"ours": call.ours(), "packed": call.packed()}
    launches |= {name: call.of_library(x) for name, (x, _) in operators.items()}
    failed = {}
    for name, launch in list(launches.items()):
        try:
            launch()
            torch.cuda.synchronize()
        except Exception as error:
            failed[name] = str(error).splitlines()[0][:200]
            del launches[name]
    took = on_gpu(launches)
    rate = {"GB_s": round(call.bytes / took["ours"] / 1e3)} if shape.queries <= 4 else {}
    rate |= {"TFLOP_s": round(call.flops / took["ours"] / 1e6, 1)}
    return {**shape._asdict(), "us": took, **rate, **({"failed": failed} if failed else {})}


def ratio(row: dict[str, Any]) -> float:
    """How many times as long the fastest of the other builds takes."""
    return min(us for name, us in row["us"].items() if name in LIBRARIES) / row["us"]["ours"]


def summary(rows: list[dict[str, Any]]) -> str:
    """Geometric mean and worst ratio of rows."""
    ratios = [ratio(row) for row in rows]
    return f"{statistics.geometric_mean(ratios):.2f} | {min(ratios):.2f} | {len(rows)}"


def page(facts: dict[str, Any]) -> str:
    """The figures as a page in Markdown."""
    rows = facts["rows"]
    kinds = {"decoding, 1 query": (1,), "decoding, 4 queries": (4,), "prompts and chunks": (2048, 4096)}
    sums = [
        f"| {dtype} | {kind} | {summary([r for r in rows if r['dtype'] == dtype and r['queries'] in queries])} |"
        for dtype in dict.fromkeys(r["dtype"] for r in rows)
        for kind, queries in kinds.items()
    ]
    names = [name for name in TITLES if name in rows[0]["us"]]
    table = [
        f"| {r['dtype']} | {r['batch']}{' ragged' * r['is_ragged']} | {r['queries']} | {r['keys']:,} | {r['heads_kv']} "
        f"| {r['page_size']} | {' | '.join(str(r['us'].get(n, 'fails')) for n in names)} | {ratio(r):.2f} "
        f"| {r.get('GB_s', '')} | {r['TFLOP_s']} |"
        for r in rows
    ]
    host = ", ".join(f"{TITLES[name]} {us:.0f} us" for name, us in facts["host_us"].items())
    builds = ", ".join(f"{TITLES[name]} (`{digest}`)" for name, digest in facts["libraries"].items())
    return f"""# Attention over pages, beside the builds that serve

{HEADS} query heads of {HEAD_DIM} channels, keys in pages in random order. {facts["gpu"]}, torch {facts["torch"]}; {builds}, ours are the launches
`{facts["launches_sha256"][:12]}`. A launch is timed in a CUDA graph of {REPEATS}, peers in turn, median of {ROUNDS}; ours and theirs choose their own splits.
The ratio is the time of the faster build over ours. Data: [serving.json](serving.json); made by [run.py](run.py).

| dtype | calls | geometric mean of the ratio | worst | shapes |
|---|---|---:|---:|---:|
{chr(10).join(sums)}

A call keeps the host: {host}. Builds are called as operators, ours as a Python function that checks its arguments.

| dtype | batch | queries | keys | heads of keys | page | {" | ".join(f"{TITLES[n]}, us" for n in names)} | ratio | GB/s of K and V | TFLOP/s |
|---|---:|---:|---:|---:|---:|{"---:|" * len(names)}---:|---:|---:|
{chr(10).join(table)}
"""  # noqa: E501 (lines of the page)


@torch.inference_mode()
def main() -> None:
    out, *rest = sys.argv[1:]
    if "--warm" in rest:
        first, step = map(int, rest[rest.index("--warm") + 1].split("/"))
        for shape in shapes()[first::step]:
            call = Call(shape)
            call.ours()()
            call.packed()()
        torch.cuda.synchronize()
        return
    operators = libraries(Path(rest[0])) if rest else {}
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **evidence_facts("paged"),
        "libraries": {name: digest for name, (_, digest) in operators.items()},
        "host_us": of_host(operators),
        "rows": [],
    }
    print(facts, flush=True)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for shape in shapes():
        facts["rows"].append(measured(shape, operators))
        print(json.dumps(facts["rows"][-1]), flush=True)
        (folder / "serving.json").write_text(json.dumps(facts, indent=1) + "\n")
    if operators:
        (folder / "README.md").write_text(page(facts))


if __name__ == "__main__":
    main()
