"""Measured log-probabilities over predicted ones on a GPU, of a model with random weights and the shape of a known one.

``python -m fa3_reports.measured.gpu_logprobs FILE.csv`` writes a row for each text, format and kernel as soon as it is
measured, and before the first one what ran, beside it. Random weights have no outliers, as trained ones do, so that
nothing follows for trained models.

The measure has the weights in binary32, without TF32, and attention in float64. The prediction is the package's own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fa3_kernels.audit.evidence import evidence_facts
from fa3_reference.problem import Dtype
from fa3_reports.measured.predicted_logprobs import SIZES, made
from fa3verify import files
from fa3verify.known.libraries import FOLDER_VARIABLE
from fa3verify.known.registry import find
from fa3verify.models.attention import ExactAttention, KernelAttention
from fa3verify.models.divergence import Divergence, KernelLogprobs, Sampled
from fa3verify.models.logprobs import OF_TRANSFORMERS, LanguageModel, attention_of, format_of, judged, predict
from fa3verify.models.rounding import Variances
from fa3verify.timed.timing import query

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
        **{"max_position_embeddings": 131072, "initializer_range": 0.02},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True},
}
KERNELS = {
    "cuda": ("gluon.bf16", "flash2.bf16", "flash3.bf16"),
    "cpu": ("twin.bf16", "twin.flash2.bf16", "twin.flash3.bf16"),
}
RESTS: tuple[Dtype, ...] = ("bf16", "fp32")
MOST_TOKENS = {"eager": 2048}  # of a text whose scores of all layers are kept for gradients
COLUMNS = (
    *("model", "parameters", "tokens", "rest", "kernel", "beside", "measured_nats", "predicted_nats", "ratio"),
    *("calls", "judged", "wrong", "seconds", "judging_seconds", "gpu", "torch", "transformers", "launches_sha256"),
    "note",
)


class Row(NamedTuple):
    """What a kernel did to a text in a model whose rest is in some format.

    Attention of ``beside`` is what it is compared with, ``exact`` or another kernel. ``found`` is None where ``note``
    says why nothing was measured. Seconds are of the kernel's run, with copies to the host and back, and of judging
    some of its calls.
    """

    tokens: int
    rest: Dtype
    kernel: str
    beside: str
    found: KernelLogprobs | None = None
    calls: int = 0
    seconds: float = 0.0
    judging_s: float = 0.0
    note: str = ""

    def figures(self) -> list[object]:
        """Return the columns from tokens to judging_seconds, empty without a measurement or a prediction."""
        of = [self.tokens, self.rest, self.kernel, self.beside]
        if self.found is None:
            return [*of, *[""] * 8]
        rms = self.found.found.rms
        predicted = self.found.predicted
        nats = [f"{rms:.4g}", *([f"{predicted:.4g}", f"{rms / predicted:.4g}"] if predicted else ["", ""])]
        judged_calls = [self.calls, self.found.calls, len(self.found.wrong)]
        return [*of, *nats, *judged_calls, f"{self.seconds:.1f}", f"{self.judging_s:.1f}"]


class Measure(NamedTuple):
    """A text in a model, and its log-probabilities where attention is that of ``beside``."""

    model: LanguageModel
    text: torch.Tensor
    due: Sampled
    beside: str = "exact"

    def row(self, kernel: str, note: str) -> Row:
        """Return the row of a kernel of which nothing was measured."""
        return Row(len(self.text), self.model.rest, kernel, self.beside, note=note)


class _Checkpointed(TorchFunctionMode):
    """Has gradients compute torch's attention again: the scores of all layers are more than a GPU has memory for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(*tensors: Any) -> Any:
            with torch._C.DisableTorchFunction():  # type: ignore[attr-defined] # once is enough
                return func(*tensors, **(kwargs or {}))

        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        return checkpoint(run, *args, use_reentrant=False) if is_attention else func(*args, **(kwargs or {}))


class Bench:
    """A model with random weights on a device, random tokens for it, and kernels.

    ``judges`` is how many calls of a run are judged at most, in layers that are spread evenly.
    """

    def __init__(self, shape: str, device: str, layers: int, judges: int, kernels: Sequence[str]) -> None:
        sizes: dict[str, Any] = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
        with torch.device(device):
            self._model = made(seed=0, **sizes)
        self._device = device
        self._vocabulary = sizes["vocab_size"]
        self._judges = judges
        self._kernels = kernels
        self.parameters = sum(x.numel() for x in self._model.parameters())
        self._exact: dict[int, Sampled] = {}

    def rows(self, lengths: Sequence[int], alone: int) -> Iterator[Row]:
        """Yield the rows of texts of so many tokens.

        On one of ``alone`` tokens, if any, kernels are compared with the first of them.
        """
        for rest in RESTS:
            model = LanguageModel(self._model, rest)
            for tokens in lengths:
                yield from self._predicted(model, self._text(tokens))
            if alone and rest != "fp32":
                text = self._text(alone)
                first, *others = self._kernels
                measure = Measure(model, text, model.sample(text, attention_of(first)), first)
                yield from (self._row(measure, name, {}) for name in (*others, "sdpa"))
            del model
            self._freed()

    def _text(self, tokens: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(tokens)
        return torch.randint(0, self._vocabulary, (tokens,), generator=random).to(self._device)

    def _predicted(self, model: LanguageModel, text: torch.Tensor) -> Iterator[Row]:
        """Yield the rows of all kernels, and of what Transformers has where it rounds: not in binary32."""
        if len(text) not in self._exact:
            with _told("exact"):
                self._exact[len(text)] = model.sample(text, ExactAttention(), exactly=True)
        measure = Measure(model, text, self._exact[len(text)])
        others = [(name,) for name in OF_TRANSFORMERS if model.rest != "fp32"]
        for names in (self._kernels, *others):
            if len(text) > MOST_TOKENS.get(names[0], len(text)):
                yield measure.row(names[0], "its gradients keep the scores of all layers, too many of this text")
                continue
            variances: Mapping[str, Variances] = {}
            attentions = [attention_of(name) for name in names if not _why_not(name)]
            with _told(f"prediction of {', '.join(names)}"), _Checkpointed():
                variances = predict(model, text, attentions, seed=0)
            self._freed()
            yield from (self._row(measure, name, variances) for name in names)

    def _row(self, measure: Measure, name: str, variances: Mapping[str, Variances]) -> Row:
        """Measure a kernel, or say why it fails, so that the others are still measured."""
        if reason := _why_not(name):
            return measure.row(name, reason)
        attention = attention_of(name, keeps=measure.beside == "exact")
        began = time.perf_counter()
        try:
            sampled = measure.model.sample(measure.text, attention)
            ran = time.perf_counter()
            calls = attention.calls if isinstance(attention, KernelAttention) else []
            drawn = calls[:: math.ceil(len(calls) / self._judges)] if calls and self._judges else []
            wrong = tuple(filter(None, (judged(call, self._device) for call in drawn)))
        except Exception as error:
            traceback.print_exc()
            return measure.row(name, f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            ended = time.perf_counter()
            self._freed()
        found = KernelLogprobs(
            name=name,
            found=Divergence.between(sampled, measure.due),
            variances=variances.get(format_of(attention), Counter()),
            calls=len(drawn),
            wrong=wrong,
        )
        layers = ", ".join(str(call.layer) for call in drawn)
        return measure.row(name, f"judged are layers {layers}" if drawn else "")._replace(
            found=found, calls=len(calls), seconds=ran - began, judging_s=ended - ran
        )

    def _freed(self) -> None:
        if self._device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Print what took how long and how much memory, or why it failed: rows are then without it."""
    began = time.perf_counter()
    try:
        yield
    except Exception:
        if what == "exact":
            raise
        traceback.print_exc()
    print(f"    {what}: {time.perf_counter() - began:.1f} s{_memory()}", flush=True)


def _memory() -> str:
    if not torch.cuda.is_available():
        return ""
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f", {most:.0f} GiB at most"


@cache
def _why_not(name: str) -> str:
    """Return why a kernel cannot run here, empty if it can."""
    return "" if name in OF_TRANSFORMERS else find(name).unavailable or ""


def facts(device: str, kernels: Sequence[str]) -> dict[str, Any]:
    """Return what ran: the machine, versions, launches and binaries."""
    machine = {"gpu": query("name"), "driver": query("driver_version")} if device == "cuda" else {"gpu": ""}
    return {
        **machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernels": {name: dict(find(name).code.identity()) for name in kernels if not _why_not(name)},
        **evidence_facts("forward"),
        "date_utc": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table and what ran, and print every row."""
    parser = argparse.ArgumentParser(prog="python -m fa3_reports.measured.gpu_logprobs", description=__doc__)
    parser.add_argument("out", type=Path, help="the table; beside it FILE_provenance.json")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192], help="lengths of texts; eager up to 2048")
    parser.add_argument("--alone", type=int, default=0, help="tokens of a text on which kernels are compared alone")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--shape", choices=SHAPES, default="Llama-3.2-1B")
    parser.add_argument("--device", choices=KERNELS, default="cuda")
    parser.add_argument("--kernel", action="append", help="instead of ours, FlashAttention-2 and -3")
    parser.add_argument("--judged", type=int, default=8, help="calls of a run that are judged at most")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="the folder of FlashAttention-3's binary")
    asked = parser.parse_args(arguments)
    if asked.peers.is_dir():
        os.environ.setdefault(FOLDER_VARIABLE, str(asked.peers.resolve()))
    torch.set_float32_matmul_precision("highest")
    kernels = asked.kernel or KERNELS[asked.device]
    began = time.perf_counter()
    ran = facts(asked.device, kernels)
    files.write_text(asked.out.with_name(f"{asked.out.stem}_provenance.json"), files.json_text(ran))
    bench = Bench(asked.shape, asked.device, asked.layers, asked.judged, kernels)
    print(f"{asked.shape}: {bench.parameters:,} parameters, {time.perf_counter() - began:.1f} s", flush=True)
    versions = [ran[name] for name in ("gpu", "torch", "transformers", "launches_sha256")]
    table: list[list[object]] = []
    for row in bench.rows(asked.tokens, asked.alone):
        table.append([asked.shape, bench.parameters, *row.figures(), *versions, row.note])
        files.write_text(asked.out, files.csv_text(COLUMNS, table))
        words = row.found or f"{row.kernel}: {row.note}"
        at = time.perf_counter() - began
        print(f"{row.tokens:,} tokens, the rest in {row.rest}, beside {row.beside}, at {at:.0f} s: {words}", flush=True)


if __name__ == "__main__":
    main()
