"""Mistakes to plant in the text of the descriptions in docs/schedules, and what a finding must name.

Each changes one place of a page. ``FRESH`` were written before the checker was asked about them; 40 kinds that earlier
descriptions had are in :mod:`tests.simulator.listed_mistakes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """``old`` becomes ``new`` in a page; findings must have all ``words`` in what they say.

    Attributes
    ----------
    kernel : str
        ``page.kernel``.
    nth : int
        Which of several places it is, from 1; 0: the page has one.
    values : dict
        Of the kernel's parameters.
    missed : str
        Why no finding has these words.
    """

    kernel: str
    what: str
    words: tuple[str, ...]
    old: str = ""
    new: str = ""
    nth: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    missed: str = ""

    def planted(self, text: str) -> str:
        """Return the text of the page with the mistake; ValueError where the page has another text by now."""
        parts = text.split(self.old) if self.old else [text]
        if self.old and (len(parts) <= self.nth or (self.nth == 0 and len(parts) != 2)):
            raise ValueError(f"{self.kernel}, {self.what}: the page has {self.old!r} {len(parts) - 1} times")
        at = self.nth or 1
        return self.old.join(parts[:at]) + self.new + self.old.join(parts[at:]) if self.old else text


def gemm(kernel: str, what: str, words: str, old: str = "", new: str = "", **more: Any) -> Mistake:
    page = "gemm" if kernel in ("cooperative", "pingpong", "cluster") else "fast_cu"
    return Mistake(kernel=f"{page}.{kernel}", what=what, words=tuple(words.split("|")), old=old, new=new, **more)


def attention(kernel: str, what: str, words: str, old: str = "", new: str = "", **more: Any) -> Mistake:
    page = "flashmla" if kernel == "flashmla" else "attention"
    return Mistake(kernel=f"{page}.{kernel}", what=what, words=tuple(words.split("|")), old=old, new=new, **more)


BIG = {"bm": 128, "bn": 128}  # tiles of the tutorial that two warpgroups compute
FRESH = (
    gemm(
        "cooperative",
        "the last stage is released twice",
        "AB_empty",
        "            c.wgmma_wait(0)\n            c.release(last)\n            store(c",
        "            c.wgmma_wait(0)\n            c.release(last)\n            c.release(last)\n            store(c",
    ),
    gemm(
        "cooperative",
        "only the thread that started a store waits for it before all write",
        "slot C.",
        "        c.store_wait(len(parts) - 1)\n        c.bar_sync(barrier)\n",
        "        c.store_wait(len(parts) - 1)\n",
    ),
    gemm(
        "cooperative",
        "both consumers stage in the same bytes",
        "slot C[",
        'cta.smem(f"C.{w}[{i}]", rows',
        'cta.smem(f"C[{i}]", rows',
    ),
    gemm(
        "pingpong",
        "the turn of epilogues is not passed on",
        "epilogue turn",
        "                c.store_wait()\n                give(turns[1])\n",
        "                c.store_wait()\n",
    ),
    gemm(
        "pingpong",
        "the turn of main loops is passed on twice",
        "main loop turn",
        "                give(turns[0])\n",
        "                give(turns[0])\n                give(turns[0])\n",
    ),
    gemm(
        "cluster",
        "half of B is loaded for the own CTA only",
        "AB_full",
        "                for both in rings:\n                    p.load_only(",
        "                for both in [ring]:\n                    p.load_only(",
    ),
    gemm(
        "cluster",
        "both arrivals go to the own CTA",
        "B0[0]",
        "c.arrive(both.empty[stage.index])",
        "c.arrive(ring.empty[stage.index])",
    ),
    gemm(
        "one_warpgroup",
        "A is not waited for",
        "slot sA",
        "            for barrier in full.values():\n                w.wait(barrier, step)",
        "            for barrier in list(full.values())[1:]:\n                w.wait(barrier, step)",
    ),
    gemm("one_warpgroup", "the products are not waited for", "slot d of", "            w.wgmma_wait(0)\n", ""),
    gemm(
        "queue",
        "full does not count the consumers' threads",
        "AB_full",
        "full_arrivals=1 + consumers",
        "full_arrivals=1",
    ),
    gemm(
        "fast_queue",
        "the producer loads one stage too many",
        "slot A[",
        "    for tile in tiles:\n        for _ in range(tile.blocks):\n            stage = p.acquire(ring)",
        "    for tile in tiles:\n        for _ in range(tile.blocks + 1):\n            stage = p.acquire(ring)",
        nth=1,
    ),
    gemm("stored_by_tma", "as published: no fence, one thread waits, the CTA ends", "sC", values={"mended": False}),
    attention(
        "flash3",
        "Q is handed back behind the first block",
        "slot Q.",
        "            exponentials(scores)\n            for block",
        "            exponentials(scores)\n            c.arrive(q_empty)\n            for block",
    ),
    attention("flash3", "O is written while others read V", "slot O.|V[0]", "            c.bar_sync(read)\n", ""),
    attention(
        "flash3",
        "the producer waits for O of this tile",
        "O_stored",
        "p.wait(stored, number - 1)",
        "p.wait(stored, number)",
    ),
    attention(
        "flash2",
        "the next K is copied over the one that is read",
        "slot sK",
        "            arrived()\n            if block + 1 < tile.blocks:\n                w.cp_async(k)\n",
        "            if block + 1 < tile.blocks:\n                w.cp_async(k)\n            arrived()\n",
    ),
    attention(
        "tutorial",
        "the last P V is not waited for",
        "O of",
        "            before += tile.blocks\n            c.wgmma_wait(0)\n",
        "            before += tile.blocks\n",
    ),
    attention(
        "tutorial",
        "each warpgroup loads",
        "K_full",
        "            if w == 0 and wanted:\n",
        "            if wanted:\n",
        values=BIG,
    ),
    attention(
        "thunderkittens",
        "K and V arrive at one barrier",
        "k_smem_arrived",
        "p.tma_load(arrived[x][j % stages]",
        'p.tma_load(arrived["k"][j % stages]',
    ),
    attention(
        "flashmla",
        "sums are read before the other warpgroup has written them",
        "sL_reduction_wksp",
        "            w.write(sums[n])\n            w.bar_sync(everyone)\n",
        "            w.write(sums[n])\n",
    ),
)
