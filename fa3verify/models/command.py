"""What the verb ``logprobs`` does with a folder of Transformers and texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fa3_reference.problem import Dtype
from fa3_reference.quantize import QuantScheme
from fa3_reference.rules import require
from fa3verify.campaign.pool import default_workers, processes
from fa3verify.files import json_text, write_text
from fa3verify.models.attention import KernelAttention
from fa3verify.models.decoding import decode
from fa3verify.models.logprobs import LanguageModel, RunOfText, attention_of, gathered, run_text
from fa3verify.models.measured import explain, read
from fa3verify.models.page import page
from fa3verify.models.spending import spend


def tokens_of(folder: Path, texts: Sequence[Path], most: int) -> list[torch.Tensor]:
    """Return the first tokens of texts: of a .npy file its integers, of any other what the folder's tokenizer makes.

    ValueError for a text of fewer than two tokens.
    """
    tokenizer: Any = (
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if any(path.suffix != ".npy" for path in texts)
        else None
    )
    ids = (np.load(x) if x.suffix == ".npy" else tokenizer(x.read_text("utf-8")).input_ids for x in texts)
    found = [torch.as_tensor(each, dtype=torch.int64)[:most] for each in ids]
    short = [str(path) for path, tokens in zip(texts, found, strict=True) if len(tokens) < 2]
    require(not short, f"{', '.join(short)} has fewer than two tokens")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRequest:
    """The options of the verb by their own names: kernels in a model on texts, of which the first ``tokens`` count.

    ``budget`` and ``gate`` are nats RMS or None, ``page_size`` is of a cache where it decodes, ``json`` and ``html``
    are files for all figures and a page, and 0 ``workers`` are a process a core. ``rest`` is None for its default.
    ``measured`` are two dumps, instead of texts and kernels.
    """

    model: Path
    text: Sequence[Path]
    kernel: Sequence[str]
    rest: Dtype | None
    tokens: int
    rotated: bool
    decode: bool
    page_size: int
    by_token: bool
    budget: float | None
    gate: float | None
    json: Path | None
    html: Path | None
    seed: int
    workers: int
    measured: tuple[Path, Path] | None = None


_WITHOUT_EFFECT = {  # by what is asked for: options that it has no use for
    "--measured": {"--text", "--kernel", "--decode", "--budget", "--gate", "--rotated", "--page-size", "--by-token"},
    "--decode": {"--budget", "--gate", "--rotated", "--by-token", "--html"},
    "--budget": {"--gate", "--page-size", "--by-token", "--html"},
    "--kernel alone": {"--page-size"},
}


def answer(asked: LogprobsRequest) -> tuple[str, bool]:
    """Return what the verb prints, and whether nothing was wrong and every limit was kept.

    Figures and a page are written where that is asked for.

    ValueError for options that do not go together, and for what a model or kernel refuses.
    """
    given = {f"--{each.name.replace('_', '-')}" for each in fields(asked) if getattr(asked, each.name)}
    mode = next((option for option in ("--measured", "--decode", "--budget") if option in given), "--kernel alone")
    idle = given & _WITHOUT_EFFECT[mode]
    require(not idle, f"{', '.join(sorted(idle))}: no effect with {mode}")
    is_whole = mode == "--measured" or {"--text", "--kernel"} <= given
    require(is_whole, "a kernel and a text are needed, or --measured with two dumps")
    found = [*_found(asked)]
    if asked.json:
        figures = [asdict(each) for each in found]
        for kernel in chain.from_iterable(each.get("kernels", ()) for each in figures):
            kernel["variances"] = [{**place._asdict(), "variance": x} for place, x in kernel["variances"].items()]
        write_text(asked.json, json_text({"schema": "fa3verify.logprobs/1", "found": figures}))
    if asked.html:
        write_text(asked.html, page(found[0], str(asked.model)))
    beyond = [
        f"beyond the gate of {asked.gate:g} nats: {kernel.name}"
        for kernel in (found[0].kernels if asked.gate else ())
        if kernel.found.rms > asked.gate
    ]
    return "\n".join([*map(str, found), *beyond]), all(found) and not beyond


def _found(asked: LogprobsRequest) -> Iterable[Any]:
    """Return what is found, of --decode one of each kernel and text."""
    rest: Dtype = asked.rest or ("bf16" if asked.measured else "fp32")
    if asked.measured:
        require(rest != "fp32", "--measured is of programs in 16 bits: --rest must be bf16 or fp16, got fp32")
        return [explain(loaded(asked.model, rest), *(read(x, asked.tokens) for x in asked.measured), seed=asked.seed)]
    texts = tokens_of(asked.model, asked.text, asked.tokens)
    scheme = QuantScheme("head", hadamard_seed=0) if asked.rotated else None
    if asked.decode:
        return (
            decode(loaded(asked.model, rest), text, name, page_size=asked.page_size)
            for name in asked.kernel
            for text in texts
        )
    if asked.budget is None:
        return [gathered(asked.kernel, rest, _runs(asked, rest, texts, scheme))]
    pair = [each for name in asked.kernel if isinstance(each := attention_of(name, scheme), KernelAttention)]
    require(
        len(pair) == len(asked.kernel) == 2,
        "a budget is for two kernels: the cheaper, and the one that some layers keep",
    )
    return [spend(loaded(asked.model, rest), texts, (pair[0], pair[1]), asked.budget, asked.seed)]


@cache
def loaded(folder: Path, rest: Dtype = "fp32") -> LanguageModel:
    """Return the model of a folder of Transformers, once a process."""
    return LanguageModel(AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True), rest)


def _run(folder: Path, rest: Dtype, *text: Any, **how: Any) -> list[RunOfText] | ValueError:
    """Return a ValueError instead of raising it, as a pool adds its type and place to the message."""
    try:
        return run_text(loaded(folder, rest), *text, **how)
    except ValueError as error:
        return error


def _runs(
    asked: LogprobsRequest, rest: Dtype, texts: Sequence[torch.Tensor], scheme: QuantScheme | None
) -> list[list[RunOfText]]:
    """Run every text under every kernel, in a process a core where there are several texts.

    ValueError for what a model or kernel refuses; the pool's TaskError for a process that is lost.
    """
    run = partial(
        _run,
        asked.model,
        rest,
        kernels=asked.kernel,
        scheme=scheme,
        draws=2 if len(texts) == 1 else 1,
        by_token=asked.by_token,
    )
    given = [text.numpy() for text in texts], range(asked.seed, asked.seed + len(texts))
    workers = min(asked.workers or default_workers(), len(texts))
    runs = []
    with processes(workers) if workers > 1 else contextlib.nullcontext() as pool:
        for each in (pool.map if pool else map)(run, *given):
            if isinstance(each, ValueError):
                raise each
            runs.append(each)
    return runs
