"""The kernel that writes to a cache, run by Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest

from tests.kernels.interpreted import check_equal

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")
pytestmark = pytest.mark.optional

PROGRAM = """
import numpy as np, torch
from fa3_kernels.gluon.append import append
from fa3_kernels.plan.append import Append, append_call
from fa3_kernels.plan.call import Pointer
from fa3_kernels.plan.request import ONE_PAGE, TensorLayout
from fa3_kernels.twin.append import rotated

rng = np.random.default_rng(SEED)


def layout(x):
    return TensorLayout(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."))


for trial in range(4):
    is_paged, rotary, interleaved, steps = trial % 2 == 0, (0, 32, 64, 16)[trial], trial < 2, trial != 1
    heads, heads_kv, d, dv, page, entries, angles = 12, 3, 64, 32, 8, 5, 48
    room = page * entries
    q_lengths, new = [1, 4, 0], [3, 0, 9]  # the last has room for fewer
    held = [5, 7, room - 6]
    starts = [torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (q_lengths, new)]
    pages = 20 if is_paged else 4
    table = torch.tensor(rng.permutation(pages)[: 3 * entries].reshape(3, -1) if is_paged else [[2], [0], [3]]).int()
    shape = (pages, page if is_paged else room, heads_kv)
    half = lambda *shape: torch.tensor(rng.standard_normal(shape)).half()
    q, k, v = half(sum(q_lengths), heads, d), half(sum(new), 2 * heads_kv, d)[:, ::2], half(sum(new), heads_kv, dv)
    caches = [half(*shape, d), half(*shape, dv)]
    cos, sin = half(angles, rotary // 2), half(angles, rotary // 2)
    out, used = torch.full_like(q, torch.nan), torch.zeros(3, dtype=torch.int32)
    positions = torch.tensor(held if trial != 3 else [40, 2, 45], dtype=torch.int32)
    wanted = [x.numpy().copy() for x in caches]
    none = np.zeros((len(q), heads, rotary // 2), np.float16)
    turned = rotated(q.numpy(), none, none, is_interleaved=True)
    angle = lambda at: [x[min(at, angles - 1)].numpy() for x in (cos, sin)]
    for b in range(3):
        for i in range(q_lengths[b]):
            row = int(starts[0][b]) + i
            c, s = angle(int(positions[b]) + i * steps)
            turned[row] = rotated(q[row].numpy(), c[None], s[None], is_interleaved=interleaved)
        for i in range(new[b]):
            row, key = int(starts[1][b]) + i, held[b] + i
            if key < room:
                where = (table[b, key // page], key % page) if is_paged else (table[b, 0], key)
                c, s = angle(int(positions[b]) + i)
                wanted[0][where] = rotated(k[row].numpy(), c[None], s[None], is_interleaved=interleaved)
                wanted[1][where] = v[row].numpy()
    of = Append(*map(layout, (q, k, v, *caches)), page if is_paged else ONE_PAGE, 3, rotary, interleaved, steps)
    named = {"q": q, "q_rotated": out, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "rotary_cos": cos}
    named |= {"rotary_sin": sin, "starts_q": starts[0], "starts_k": starts[1], "rotary_seqlens": positions}
    named |= {"seqlens": torch.tensor(held, dtype=torch.int32), "page_table": table, "used": used}
    sizes = {"rows_q": len(q), "rows_k": len(k), "rows": 12, "table_row": table.stride(0)}
    sizes |= {"room": room, "angles": angles}
    call = append_call(of).of(sizes)
    append[call.grid](*(named[x.name] if isinstance(x, Pointer) else x for x in call.arguments))
    for got, want in zip(caches, wanted, strict=True):
        assert np.array_equal(got.numpy().view(np.int16), want.view(np.int16)), trial
    assert used.tolist() == [a + b for a, b in zip(held, new)]
    if rotary:
        assert np.array_equal(out.numpy().view(np.int16), turned.view(np.int16)), trial
    else:
        assert bool(out.isnan().all())
print("equal")
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_new_rows_lie_where_the_pages_say_and_are_rotated_to_the_bit(seed):
    check_equal(PROGRAM, seed)
