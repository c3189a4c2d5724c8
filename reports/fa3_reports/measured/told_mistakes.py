"""Mistakes that were planted in a model's attention, and what its log-probabilities beside a right program's tell.

``python -m fa3_reports.measured.told_mistakes FILE.csv MODEL`` writes a row for each planted mistake, and for each pair
of right programs, of a trained MODEL, a folder of Transformers, and of small ones with random weights. The right
program is Transformers' ``eager``, the other one has a kernel's twin; both are in BF16.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from fa3_reference.problem import AttentionProblem
from fa3_reports.measured.predicted_logprobs import made, text
from fa3verify import files
from fa3verify.known.registry import find
from fa3verify.models.attention import Attention, KernelAttention, LayerCall
from fa3verify.models.command import tokens_of
from fa3verify.models.logprobs import LanguageModel, attention_of
from fa3verify.models.measured import EVERY, Explained, explained
from fa3verify.models.mistakes import rotary

KERNEL = "twin.bf16"
RIGHT = ("eager", "twin.bf16", "twin.flash3.bf16", "sdpa", "twin.flash2.bf16", "twin.cudnn.bf16")
COLUMNS = (
    *("model", "planted", "layer", "amount", "named", "named_layer", "named_amount", "z"),
    *("seen_nats", "predicted_nats", "relative", "left", "tested", "verdict"),
)
SEED = 60
TEXTS = (("shlex.py", "serving.md"), ("dataclasses.py", "libraries.md"))  # of the standard library, and of docs/
Arrays = Sequence[np.ndarray]  # q, k and v, (1, seqlen, heads, head_dim)
Compute = Callable[[AttentionProblem, Arrays], np.ndarray]
Plant = Callable[[Compute, AttentionProblem, Arrays], np.ndarray]


class Planted(NamedTuple):
    """A mistake by the words of :mod:`fa3verify.models.mistakes`, where it is, its amount, and how it is planted:
    around calls of a kernel, or as a fault of the twin by its name."""

    words: str
    layer: int
    amount: float
    plant: Plant | str


class _Wrong(KernelAttention):
    """A kernel whose calls are wrong."""

    def __init__(self, plant: Plant) -> None:
        super().__init__(find(KERNEL))
        self._plant = plant

    def computed(self, layer: int, problem: AttentionProblem, arrays: Arrays, sinks: torch.Tensor | None) -> np.ndarray:
        right = super().computed
        return self._plant(lambda asked, given: right(layer, asked, given, sinks), problem, arrays)


def _cut(problem: AttentionProblem, arrays: Arrays, queries: slice, keys: slice) -> tuple[AttentionProblem, Arrays]:
    q, k, v = arrays[0][:, queries], arrays[1][:, keys], arrays[2][:, keys]
    return replace(problem, seqlen_q=q.shape[1], seqlen_k=k.shape[1]), (q, k, v)


def scaled(by: float) -> Plant:
    return lambda compute, x, given: compute(replace(x, softmax_scale=x.softmax_scale * (1 + by)), given)


def louder(by: float) -> Plant:
    return lambda compute, x, given: compute(x, (given[0], given[1], given[2] * np.float32(1 + by)))


def rotated(by: float, frequencies: np.ndarray) -> Plant:
    def plant(compute: Compute, x: AttentionProblem, given: Arrays) -> np.ndarray:
        half = len(frequencies)
        turn = np.exp(1j * by * frequencies)
        pairs = (given[1][..., :half] + 1j * given[1][..., half : 2 * half]) * turn
        k = np.concatenate([pairs.real, pairs.imag, given[1][..., 2 * half :]], -1).astype(np.float32)
        return compute(x, (given[0], k, given[2]))

    return plant


def stale(head: int, page: int, source: int | None = None) -> Plant:
    def plant(compute: Compute, x: AttentionProblem, given: Arrays) -> np.ndarray:
        own, other = (slice(16 * at, 16 * at + 16) for at in (page, page - 1 if source is None else source))
        k, v = given[1].copy(), given[2].copy()
        for each in (k, v):
            each[:, own, head] = each[:, other, head].copy()
        return compute(x, (given[0], k, v))

    return plant


def own_key_missed(compute: Compute, x: AttentionProblem, given: Arrays) -> np.ndarray:
    out = compute(x, given).copy()
    out[:, 0] = 0
    out[:, 1:] = compute(*_cut(x, given, slice(1, None), slice(0, -1)))
    return out


def one_key_beyond(compute: Compute, x: AttentionProblem, given: Arrays) -> np.ndarray:
    out = compute(x, given).copy()
    out[:, :-1] = compute(*_cut(x, given, slice(0, -1), slice(None)))
    return out


def tail_dropped(compute: Compute, x: AttentionProblem, given: Arrays) -> np.ndarray:
    out = compute(x, given).copy()
    for row in range(128, x.seqlen_q, 128):
        out[:, row : row + 1] = compute(*_cut(x, given, slice(row, row + 1), slice(0, row)))
    return out


def merged(at: int) -> Plant:
    def plant(compute: Compute, x: AttentionProblem, given: Arrays) -> np.ndarray:
        out = compute(x, given).copy()
        problem, far = _cut(x, given, slice(at, None), slice(0, at))
        parts = (
            compute(replace(problem, causal=False), far),
            compute(*_cut(x, given, slice(at, None), slice(at, None))),
        )
        q, k = (torch.from_numpy(each[0]).to(torch.bfloat16).double() for each in given[:2])
        k = k.repeat_interleave(x.group, 1)
        s = torch.einsum("qhd,khd->qhk", q[at:], k) * x.softmax_scale
        s[
            torch.arange(x.seqlen_k)[None, None] > torch.arange(at, x.seqlen_q)[:, None, None].expand(s.shape)
        ] = -torch.inf
        lse = [s[..., :at].logsumexp(-1).numpy(), s[..., at:].logsumexp(-1).numpy()]
        powers = [np.exp2(each - np.maximum(*lse))[None, ..., None] for each in lse]
        both = sum(np.float64(part) * power for part, power in zip(parts, powers, strict=True)) / sum(powers)
        out[:, at:] = torch.from_numpy(both).to(torch.bfloat16).float().numpy()
        return out

    return plant


def windowed(by: int) -> Plant:
    return lambda compute, x, given: compute(replace(x, window=(x.window[0] + by, 0)) if x.window[0] >= 0 else x, given)


def uncapped(compute: Compute, x: AttentionProblem, given: Arrays) -> np.ndarray:
    return compute(replace(x, softcap=0.0), given)


def stale_page(head: int, page: int) -> tuple[str, Plant]:
    return f"page {page} of kv head {head} with K and V of the page before", stale(head, page)


def planned(draws: random.Random, frequencies: np.ndarray, layers: int, heads: int, n: int) -> list[Planted]:
    """Return mistakes in every layer, and in single ones that are drawn."""

    def anywhere() -> int:
        return draws.randrange(layers)

    def page() -> tuple[str, Plant]:
        return stale_page(draws.randrange(heads), draws.randrange(1, n // 16))

    smaller = (1 + 1 / (2 * len(frequencies))) ** -0.5 - 1  # 1/sqrt(head_dim + 1) for 1/sqrt(head_dim)
    scores, loud, turn = (
        "scores scaled by {:+.2%}",
        "outputs or V scaled by {:+.2%}",
        "keys rotated by {:+.2f} positions",
    )
    merge = "a merge in base 2 at {} keys"
    every = [
        Planted(scores, EVERY, 0.01, scaled(0.01)),
        Planted(scores, EVERY, -0.015, scaled(-0.015)),
        Planted(scores, EVERY, smaller, "wrong_softmax_scale"),
        Planted(loud, EVERY, 0.02, louder(0.02)),
        Planted(turn, EVERY, 0.1, rotated(0.1, frequencies)),
        Planted(merge.format(256), EVERY, 1, merged(256)),
        Planted("the last key of 128 m + 1 dropped", EVERY, 1, tail_dropped),
        Planted(*(each := page())[:1], EVERY, 1, each[1]),
    ]
    one = [
        *(Planted(scores, anywhere(), by, scaled(by)) for by in (0.08, 0.08, -0.1)),
        *(Planted(loud, anywhere(), by, louder(by)) for by in (0.08, -0.1)),
        *(Planted(merge.format(at), anywhere(), 1, merged(at)) for at in (128, 256)),
        *(Planted((each := page())[0], anywhere(), 1, each[1]) for _ in range(3)),
        Planted("the query's own key missed", anywhere(), 1, own_key_missed),
        Planted("one key beyond the query's own seen", anywhere(), 1, one_key_beyond),
        Planted("keys rotated one position on", anywhere(), 1, rotated(1, frequencies)),
        Planted("kv heads taken by remainder", anywhere(), 1, "kv_head_modulo"),
        Planted("no rescale at the second block of 128 keys", anywhere(), 1, "missed_rescale"),
        Planted("the last block of 128 keys dropped", anywhere(), 1, "dropped_last_tile"),
        Planted("the second block of 128 keys with the V of the last", anywhere(), 1, "stale_v"),
        Planted("column 0 of blocks of 128 left out of row sums", anywhere(), 1, "missing_column"),
    ]
    return every + one


def of_windows(draws: random.Random, frequencies: np.ndarray, layers: int, heads: int, n: int) -> list[Planted]:
    """Return mistakes of a model whose layers have windows, every other one, and a softcap."""
    usual = planned(draws, frequencies, layers, heads, n)
    window = 2 * draws.randrange(layers // 2)  # a layer that has one
    own = [
        Planted("windows one key short", EVERY, 1, windowed(-1)),
        Planted("windows one key long", window, 1, windowed(1)),
        Planted("softcap left out", EVERY, 1, uncapped),
    ]
    return own + [usual[number] for number in (0, 2, 3, 7, 8, 11, 15, 16, 21)]


class _Sdpa(Attention):
    """torch's function, in the model's format."""

    def attend(self, asked: LayerCall) -> torch.Tensor:
        q, k, v = asked.qkv
        scale = asked.problem.softmax_scale
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def program(planted: Planted, layers: int, is_plain: bool) -> KernelAttention:
    """Return the attention of a program with a mistake; of a plain model, layers without it have torch's function."""
    wrong = (
        KernelAttention(find(f"{KERNEL}+{planted.plant}")) if isinstance(planted.plant, str) else _Wrong(planted.plant)
    )
    right = _Sdpa() if is_plain else KernelAttention(find(KERNEL))
    kept = {layer: wrong if planted.layer in (EVERY, layer) else right for layer in range(layers)}
    return KernelAttention(find(KERNEL), kept=kept)


def sampled(
    model: LanguageModel, texts: Sequence[torch.Tensor], attention: KernelAttention | str
) -> list[torch.Tensor]:
    return [torch.as_tensor(model.sample(text, attention).logprobs) for text in texts]


class Group(NamedTuple):
    """Mistakes that are planted in a model on the same texts, and right programs of which each pair is compared."""

    name: str
    model: LanguageModel
    texts: Sequence[torch.Tensor]
    cases: Sequence[Planted]
    right: Sequence[str]
    is_plain: bool = True

    def rows(self) -> Iterator[Row]:
        """Yield a row for each pair of right programs and for each planted mistake, beside the first right program."""
        right = [sampled(self.model, self.texts, attention_of(each)) for each in self.right]
        wrong = [
            sampled(self.model, self.texts, program(each, self.model.layers, self.is_plain)) for each in self.cases
        ]
        pairs = [*combinations(right, 2), *((right[0], each) for each in wrong)]
        labels = [*combinations(self.right, 2), *self.cases]
        differences = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]
        for label, found in zip(labels, explained(self.model, self.texts, differences), strict=True):
            yield row(self.name, label, found)


Row = tuple[object, ...]


def row(name: str, label: Planted | tuple[str, str], found: Explained) -> Row:
    """Return a row of the table; in a pair of right programs nothing is planted."""
    if isinstance(label, Planted):
        planted = (label.words, label.layer, f"{label.amount:.4g}")
    else:
        planted = ("nothing: " + ", ".join(label), "", "")
    first = next(iter(found.suspects), None)
    suspect = (first.words, first.layer, f"{first.amount:.4g}", f"{first.z:.3g}") if first else ("",) * 4
    left = f"{first.left:.3g}" if first else ""
    verdict = "named" if found.named else "within rounding" if found else "unknown"
    figures = (f"{found.seen:.4g}", f"{found.predicted:.4g}", f"{found.relative:.3g}", left)
    return (name, *planted, *suspect, *figures, found.tested, verdict)


def trained(folder: Path) -> Iterator[Group]:
    """Yield groups of a trained model: two texts of code and prose each."""
    model = LanguageModel(AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True), "bf16")
    frequencies = rotary(model.wide).numpy()
    heads = model.wide.config.num_key_value_heads
    for number, (code, prose) in enumerate(TEXTS):
        paths = [Path(sysconfig.get_path("stdlib")) / code, Path("docs") / prose]
        texts = tokens_of(folder, paths, 512)
        cases = planned(random.Random(f"{SEED} {code}"), frequencies, model.layers, heads, 512)[:21]
        yield Group(f"{folder.name}: {code}, {prose}", model, texts, cases[number::2], RIGHT[:4])


def untrained() -> Iterator[Group]:
    """Yield groups of models with random weights, of architectures that no threshold was chosen with."""
    tokens = 300
    for kind, layers, sizes, plan, right, seeds in (
        ("norms of Q and K", 8, {"head_dim": 128}, planned, RIGHT, (3, 4, 5)),
        ("windows and softcap", 6, {}, of_windows, RIGHT[:3], (5, 6, 7)),
    ):
        for seed in seeds:
            model = LanguageModel(made(kind, seed, num_hidden_layers=layers, **sizes), "bf16")
            texts = [text(tokens, seed=SEED + seed), text(tokens, seed=SEED + seed + 100)]
            cases = plan(random.Random(f"{SEED} {seed}"), rotary(model.wide).numpy(), layers, 2, tokens)
            yield Group(f"{kind}, seed {seed}", model, texts, cases[(seed - 3) % 2 :: 2], right, plan is planned)


def main(file: str, folder: str) -> None:
    """Write the table, and print what was named."""
    table = [each for group in (*untrained(), *trained(Path(folder))) for each in group.rows()]
    files.write_text(Path(file), files.csv_text(COLUMNS, table))
    print(summary([dict(zip(COLUMNS, map(str, each), strict=True)) for each in table]))


def is_right(row: Mapping[str, str]) -> bool:
    """Tell whether a planted mistake was named, with its layer, and its amount within 25 %."""
    if row["verdict"] != "named" or (row["named"], row["named_layer"]) != (row["planted"], row["layer"]):
        return False
    return abs(float(row["named_amount"]) / float(row["amount"]) - 1) <= 0.25


def summary(table: Sequence[Mapping[str, str]]) -> str:
    """Say how many planted mistakes were named right, and how many pairs of right programs were blamed."""
    nulls = [row for row in table if not row["layer"]]
    planted = [row for row in table if row["layer"]]
    blamed = [row for row in nulls if row["verdict"] == "named"]
    right = [row for row in planted if is_right(row)]
    within = [row for row in nulls if row["verdict"] == "within rounding"]
    return (
        f"{len(right)} of {len(planted)} planted mistakes named with layer and amount; "
        f"of {len(nulls)} pairs of right programs {len(within)} within rounding, {len(blamed)} blamed"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
