"""Program of a backward kernel: one CTA per key tile, five GEMMs per query block, dQ added to global memory by TMA.

Two consumer warpgroups own half of the key tile each and keep its dK and dV in registers; S and dP are computed
transposed, so that P and dS are the A operands of dV and dK straight from registers. dS also goes through shared
memory, where both warpgroups read it whole for their half of the channels of dQ. The structure is FlashAttention-3's
(arXiv 2407.08608, algorithm 3) with our forward's rings; it is not validated against timings.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS, slot_threads
from fa3_simulator.program import Builder, Gemm, Mbarrier, NamedBarrier, Program, Slot, Stream, Work

CONSUMERS = 2
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tile of ``tile_m`` queries and ``tile_n`` keys of a 16-bit backward kernel; two slots for Q, dO and dS.

    Raises
    ------
    ValueError
        When a field breaks its rule.
    """

    head_dim: int = 128
    tile_m: int = 64
    tile_n: int = 128
    num_stages: int = 2

    def __post_init__(self) -> None:
        rules = (
            (self.head_dim in (64, 128), f"head_dim must be 64 or 128, got {self.head_dim}"),
            (self.tile_m in (64, 128), f"tile_m must be 64 or 128 (rows of the dQ product), got {self.tile_m}"),
            (self.tile_n == 64 * CONSUMERS, f"tile_n must be 128 (64 keys per warpgroup), got {self.tile_n}"),
            (1 <= self.num_stages <= 4, f"num_stages must lie in [1, 4], got {self.num_stages}"),
        )
        for ok, rule in rules:
            if not ok:
                raise ValueError(rule)


class _Resources:
    """Slots and barriers that the warps share."""

    def __init__(self, s: BackwardConfig) -> None:
        row, stages = 2 * s.head_dim, range(s.num_stages)
        threads = slot_threads(CONSUMERS)
        self.q = [Slot(f"q[{i}]", s.tile_m * row) for i in stages]
        self.dout = [Slot(f"dout[{i}]", s.tile_m * row) for i in stages]
        self.lse = [Slot(f"lse[{i}]", 4 * s.tile_m) for i in stages]
        self.delta = [Slot(f"delta[{i}]", 4 * s.tile_m) for i in stages]
        self.k = [Slot(f"k.{w}", 64 * row) for w in range(CONSUMERS)]
        self.v = [Slot(f"v.{w}", 64 * row) for w in range(CONSUMERS)]
        self.ds = [[Slot(f"ds[{i}].{w}", 64 * s.tile_m * 2) for w in range(CONSUMERS)] for i in range(2)]
        self.dq = [Slot(f"dq.{w}", s.tile_m * s.head_dim // 2 * 4) for w in range(CONSUMERS)]
        self.q_full = [Mbarrier(f"q_full[{i}]", 1) for i in stages]
        self.dout_full = [Mbarrier(f"dout_full[{i}]", 1) for i in stages]
        self.kv_full = Mbarrier("kv_full", 1)
        self.q_empty = [NamedBarrier(f"q_empty[{i}]", 5 + i, threads) for i in stages]
        self.dout_empty = [NamedBarrier(f"dout_empty[{i}]", 5 + s.num_stages + i, threads) for i in stages]
        self.kv_empty = NamedBarrier("kv_empty", 5 + 2 * s.num_stages, threads)
        self.both = NamedBarrier("both warpgroups", 6 + 2 * s.num_stages, WARPGROUP_THREADS * CONSUMERS)
        self.own = [NamedBarrier(f"warpgroup {w}", w + (w > 0), WARPGROUP_THREADS) for w in range(CONSUMERS)]


class _Consumer:
    """One warpgroup: 64 keys of every key tile."""

    def __init__(self, builder: Builder, shared: _Resources, s: BackwardConfig, index: int) -> None:
        self.shared, self.s, self.index = shared, s, index
        self.stream = builder.actor(f"consumer {index}", WARPGROUP_THREADS, CONSUMER_REGISTERS)
        lane, k = s.tile_m // 2, s.head_dim // 16  # scores of a lane; k steps over channels
        chunks = max(1, lane // 8)
        self.scores, self.grads = (Gemm(name, k, s.tile_m, 16, False) for name in ("K Q^T", "V dO^T"))
        self.to_dv, self.to_dk = (Gemm(name, s.tile_m // 16, s.head_dim, 16, True) for name in ("P dO", "dS Q"))
        self.to_dq = Gemm("dS^T K", 64 // 16 * (s.tile_m // 64), s.head_dim // 2, 16, False)
        self.exp = Work("exp2", chunks, fma=lane, mufu=lane, convert=lane // 2, smem_bytes=4 * s.tile_m * 16)
        self.ds = Work("dS", chunks, fma=2 * lane, convert=lane // 2, smem_bytes=64 * s.tile_m * 2 + 4 * s.tile_m * 16)
        self.stage = Work(
            "dQ to shared memory",
            max(1, s.head_dim // 32),
            alu=s.tile_m * s.head_dim // 256,
            smem_bytes=s.tile_m * s.head_dim * 2,
        )
        self.finish = Work(
            "dK and dV to shared memory",
            8,
            convert=s.head_dim // 2,
            alu=s.head_dim // 8,
            smem_bytes=64 * s.head_dim * 4,
        )
        self.accumulators = {name: Slot(f"{name}.{index}", 0) for name in ("S", "dP", "dV", "dK", "dQ")}
        self.step = self.tile = 0

    def run(self, tiles: list[int]) -> None:
        stream, shared, w = self.stream, self.shared, self.index
        for number, blocks in enumerate(tiles):
            stream.mark("tile")
            stream.delay("cold_code_cycles")
            stream.wait(shared.kv_full, number)
            for _ in range(blocks):
                self.query_block()
            stream.delay("cold_code_cycles")
            stream.bar_sync(shared.both)  # the other one reads this half of K for dQ
            for name, slot in (("dV", shared.v[w]), ("dK", shared.k[w])):
                stream.read(self.accumulators[name])
                stream.write(slot)
            stream.vector(self.finish)
            stream.fence()
            stream.bar_sync(shared.own[w])
            for slot in (shared.v[w], shared.k[w]):
                stream.store(slot, slot.bytes)
            stream.store_wait()
            stream.bar_arrive(shared.kv_empty)
        stream.mark("end")

    def query_block(self) -> None:
        stream, shared, acc, w = self.stream, self.shared, self.accumulators, self.index
        slot, turn = self.step % self.s.num_stages, self.step // self.s.num_stages
        ds = shared.ds[self.step % 2]
        stream.wait(shared.q_full[slot], turn)
        stream.wgmma(self.scores, shared.k[w], shared.q[slot], acc["S"])
        stream.wait(shared.dout_full[slot], turn)
        stream.wgmma(self.grads, shared.v[w], shared.dout[slot], acc["dP"])
        stream.read(shared.lse[slot])
        stream.wgmma_wait(1)
        stream.read(acc["S"])
        stream.vector(self.exp)
        stream.read(shared.delta[slot])
        stream.wgmma_wait(0)
        stream.wgmma(self.to_dv, None, shared.dout[slot], acc["dV"])
        stream.read(acc["dP"])
        stream.write(ds[w])
        stream.vector(self.ds)
        stream.fence()
        stream.bar_sync(shared.both)
        for half in range(CONSUMERS):  # over all keys of the tile, for this warpgroup's channels
            stream.wgmma(self.to_dq, ds[half], shared.k[half], acc["dQ"])
        stream.wgmma(self.to_dk, None, shared.q[slot], acc["dK"])
        stream.wgmma_wait(1)
        stream.bar_arrive(shared.dout_empty[slot])
        stream.store_wait()
        stream.read(acc["dQ"])
        stream.write(shared.dq[w])
        stream.vector(self.stage)
        stream.fence()
        stream.bar_sync(shared.own[w])
        stream.store(shared.dq[w], shared.dq[w].bytes)  # cp.reduce.async.bulk.add
        stream.wgmma_wait(0)
        stream.bar_arrive(shared.q_empty[slot])
        self.step += 1


def _produce(stream: Stream, shared: _Resources, s: BackwardConfig, tiles: list[int]) -> None:
    step = 0
    for number, blocks in enumerate(tiles):
        if number:
            stream.bar_sync(shared.kv_empty)
        stream.load(shared.kv_full, (*shared.k, *shared.v))
        for _ in range(blocks):
            slot = step % s.num_stages
            if step >= s.num_stages:
                stream.bar_sync(shared.q_empty[slot])
            stream.load(shared.q_full[slot], (shared.q[slot], shared.lse[slot]))
            if step >= s.num_stages:
                stream.bar_sync(shared.dout_empty[slot])
            stream.load(shared.dout_full[slot], (shared.dout[slot], shared.delta[slot]))
            step += 1


def backward(config: BackwardConfig, tiles: list[int]) -> Program:
    """Program of one CTA that works through key tiles with so many query blocks each.

    Raises
    ------
    ValueError
        For a tile without a query block.
    """
    if not tiles or min(tiles) < 1:
        raise ValueError(f"every key tile needs at least one query block, got {tiles}")
    builder = Builder(f"backward d{config.head_dim} {config.tile_m}x{config.tile_n}")
    shared = _Resources(config)
    for slot in (*shared.q, *shared.dout, *shared.lse, *shared.delta, *(x for pair in shared.ds for x in pair)):
        builder.slots(slot)
    for index in range(CONSUMERS):
        _Consumer(builder, shared, config, index).run(tiles)
    _produce(builder.actor("producer", WARP_THREADS, PRODUCER_REGISTERS), shared, config, tiles)
    return builder.build()
