"""Layers that a budget keeps in another kernel, beside as many layers at random, on texts that did not choose them.

``python -m fa3_reports.measured.budget_logprobs MODEL FILE.csv TEXT TEXT...`` writes a row for each budget, choice of
layers and text: the first text chooses, the others measure. MODEL is a folder of Transformers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fa3_reference.quantize import QuantScheme
from fa3verify import files
from fa3verify.known.registry import find
from fa3verify.models.attention import ExactAttention, KernelAttention
from fa3verify.models.command import loaded, tokens_of
from fa3verify.models.logprobs import Divergence
from fa3verify.models.spending import spend

BUDGETS = (0.15, 0.12, 0.1)  # nats RMS
DRAWS = 10
TOKENS = 512
CHEAP = "twin.flash3.e4m3"
KEPT = "twin.flash3.bf16"
COLUMNS = ("budget_nats", "draw", "layers", "text", "measured_nats", "predicted_nats", "ratio")


def rows(folder: Path, paths: Sequence[Path]) -> Iterator[tuple[object, ...]]:
    """Yield the rows of the table; draw 0 is the choice of the budget, of which alone there is a prediction."""
    model = loaded(folder)
    texts = tokens_of(folder, paths, TOKENS)
    cheap, kept = (KernelAttention(find(name), QuantScheme("head")) for name in (CHEAP, KEPT))
    exact = [model.sample(text, ExactAttention(), exactly=True) for text in texts[1:]]
    for budget in BUDGETS:
        chosen = spend(model, texts[:1], (cheap, kept), budget)
        draws = random.Random(str(budget))
        for draw in range(DRAWS + 1):
            layers = sorted(draws.sample(range(model.layers), len(chosen.layers)) if draw else chosen.layers)
            mixed = KernelAttention(cheap.kernel, cheap.scheme, dict.fromkeys(layers, kept))
            for path, text, due in zip(paths[1:], texts[1:], exact, strict=True):
                rms = Divergence.between(model.sample(text, mixed), due).rms
                said = ("", "") if draw else (f"{chosen.predicted:.4g}", f"{rms / chosen.predicted:.4g}")
                yield budget, draw, " ".join(map(str, layers)), path.name, f"{rms:.4g}", *said


def main(folder: str, file: str, *texts: str) -> None:
    """Write the table, and print how the choices lie beside the draws."""
    table = list(rows(Path(folder), [*map(Path, texts)]))
    files.write_text(Path(file), files.csv_text(COLUMNS, table))
    for budget in BUDGETS:
        own = [row for row in table if row[0] == budget]
        chosen, *drawn = (np.mean([float(str(row[4])) ** 2 for row in own if row[1] == n]) for n in range(DRAWS + 1))
        ratios = sorted(float(str(row[6])) for row in own if not row[1])
        better = sum(chosen < each for each in drawn)
        print(f"{budget} nats: {ratios[0]} to {ratios[-1]} of the prediction; better than {better} of {DRAWS} draws")


if __name__ == "__main__":
    main(*sys.argv[1:])
