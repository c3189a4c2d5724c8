"""The kernel that makes the schedule of packed sequences, run by Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest

from tests.kernels.interpreted import check_equal

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")
pytestmark = pytest.mark.optional

PROGRAM = """
import numpy as np, torch
from fa3_kernels.gluon.packed_order import packed_order
from fa3_kernels.plan.packed_order import PackedOrder
from tests.kernels.packed_schedule import packed_schedule, visible_blocks
from fa3_kernels.plan.tile_order import L2_BYTES

rng = np.random.default_rng(SEED)
for trial in range(8):
    is_cache = trial > 4
    batch = int(rng.integers(1, 10))
    q, k = (tuple(int(n) for n in rng.integers(0, 500, batch)) for _ in "qk")
    k = tuple(n * (trial not in (3, 6)) for n in k)  # no sequence has a key
    q = (q[0] + 5, *q[1:]) if trial != 7 else (0,) * batch
    kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 4]))
    is_packed = group > 1 and bool(rng.integers(2))
    order = PackedOrder(
        int(rng.integers(1, 3)), 128 // group if is_packed else 128, 128, kv if is_packed else kv * group,
        1 if is_packed else group, int(rng.choice([-1, 100])), int(rng.choice([-1, 0, 30])), int(rng.choice([1, 1, 3])),
        64, is_cache, int(rng.choice([0, 90, 200])),
    )
    first_keys = rng.integers(0, 20, batch).astype(np.int32) * is_cache
    want = packed_schedule(order, q, k, int(rng.choice([1, 7, 40, 132])), 500)
    total_q, total_k, heads = sum(q), sum(k), kv * group
    starts = [torch.tensor(np.concatenate([[0], np.cumsum(x)]).astype(np.int32)) for x in (q, k)]
    if is_cache:
        starts[1] = torch.tensor(first_keys + np.array(k, np.int32))
    sequences, schedule = torch.zeros((batch, 4), dtype=torch.int32), torch.full(want.shape, -1, dtype=torch.int64)
    out, lse = torch.full((total_q, heads, 64), torch.nan).half(), torch.full((heads, total_q), torch.nan)
    packed_order[(len(want),)](
        *starts, sequences, schedule, out, lse, batch, total_q, total_k, 500, max(k) + 20, want.shape[1], heads,
        order.tile_heads, order.heads_per_kv, order.tiles_per_unit, order.positions, 128, order.left, order.right,
        order.num_splits, 4 * 64, 64, L2_BYTES=L2_BYTES, SORTED=True, ENTRIES=8, CHUNK=16, HEAD_DIM=64,
        **({"first_keys": torch.tensor(first_keys), "KEEPS_EMPTY": True} if is_cache else {}),
        **({"chunk": order.chunk} if order.chunk else {}),
    )
    assert np.array_equal(schedule.numpy(), want), (trial, q, k, order)
    if is_cache and any(q):
        assert sequences.tolist() == [[sum(q[:b]), q[b], first_keys[b], k[b]] for b in range(batch)]
    elif is_cache:  # not even one key is read
        assert not sequences[0].any()
    for b, n in enumerate(q) if order.num_splits == 1 and not is_cache else ():
        for position in range(0, n, 23):
            row = sum(q[:b]) + position
            is_empty = visible_blocks(order, n, k[b], position // order.positions, 0) == 0
            written = bool((out[row] == 0).all()), bool((lse[:, row] == -np.inf).all())
            assert written == (is_empty, is_empty), (trial, b, position, written)
print("equal")
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_schedule_is_the_rules_to_the_entry_and_rows_without_a_key_are_written(seed):
    check_equal(PROGRAM, seed)
