"""What the verb ``logprobs`` does with a folder of Transformers and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fa3_reference.problem import Dtype
from fa3_reference.quantize import QuantScheme
from fa3_reference.rules import require
from fa3verify.campaign.pool import TaskError, default_workers, processes
from fa3verify.files import json_text, write_text
from fa3verify.models.attention import KernelAttention
from fa3verify.models.decoding import decode
from fa3verify.models.divergence import LogprobsRun
from fa3verify.models.logprobs import Divergence, LanguageModel, RunOfText, attention_of, gathered, run_text
from fa3verify.models.measured import Suspect, explain, read
from fa3verify.models.page import page
from fa3verify.models.spending import spend


def tokens_of(folder: Path, texts: Sequence[Path], most: int) -> list[torch.Tensor]:
    """Return the first tokens of texts: of a .npy file its integers, of any other what the folder's tokenizer makes.

    ValueError for a text of fewer than two tokens.
    """
    found = []
    tokenizer: Any = (
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if any(path.suffix != ".npy" for path in texts)
        else None
    )
    for path in texts:
        ids = np.load(path) if path.suffix == ".npy" else tokenizer(path.read_text("utf-8")).input_ids
        found.append(torch.as_tensor(ids, dtype=torch.int64)[:most])
        if len(found[-1]) < 2:
            raise ValueError(f"{path} has fewer than two tokens")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRequest:
    """The options of the verb: kernels in a model on texts, of which the first ``tokens`` count.

    ``budget`` and ``gate`` are nats RMS or None, ``page_size`` is of a cache where it ``decodes``, ``json`` and
    ``html`` are files for all figures and a page, and 0 ``workers`` are a process a core. ``rest`` is None for its
    default. ``measured`` are two dumps, instead of texts and kernels.
    """

    model: Path
    texts: Sequence[Path]
    kernels: Sequence[str]
    rest: Dtype | None
    tokens: int
    rotated: bool
    decodes: bool
    page_size: int
    by_token: bool
    budget: float | None
    gate: float | None
    json: Path | None
    html: Path | None
    seed: int
    workers: int
    measured: tuple[Path, Path] | None = None


def answer(asked: LogprobsRequest) -> tuple[str, bool]:
    """Return what the verb prints, and whether nothing was wrong and every limit was kept.

    Figures and a page are written where that is asked for.

    ValueError for options that do not go together, and for what a model or kernel refuses.
    """
    require(not (asked.decodes and asked.rotated), "--decode has operands of e4m3 as they are: no --rotated beside it")
    require(asked.decodes or not asked.page_size, "--page-size is of --decode")
    limits = sum(x is not None for x in (asked.budget, asked.gate))
    require(limits + asked.decodes < 2, "one of --decode, --budget and --gate may be given")
    require(
        not (asked.html or asked.by_token) or (asked.budget is None and not asked.decodes),
        "--html and --by-token go with neither --decode nor --budget",
    )
    given = bool(asked.texts and asked.kernels)
    require(given or asked.measured, "a kernel and a text are needed, or --measured with two dumps")
    require(not (asked.measured and (asked.texts or asked.kernels or limits or asked.decodes)), "--measured is alone")
    if asked.measured:
        return _explained(asked, *asked.measured)
    texts = tokens_of(asked.model, asked.texts, asked.tokens)
    scheme = QuantScheme("head", hadamard_seed=0) if asked.rotated else None
    rest: Dtype = asked.rest or "fp32"
    found: list[Any]
    if asked.decodes:
        found = [
            decode(loaded(asked.model, rest), text, name, page_size=asked.page_size)
            for name in asked.kernels
            for text in texts
        ]
    elif asked.budget is not None:
        pair = [each for name in asked.kernels if isinstance(each := attention_of(name, scheme), KernelAttention)]
        if len(pair) != 2 or len(asked.kernels) != 2:
            raise ValueError("a budget is for two kernels: the cheaper, and the one that some layers keep")
        found = [spend(loaded(asked.model, rest), texts, (pair[0], pair[1]), asked.budget, asked.seed)]
    else:
        found = [gathered(asked.kernels, rest, _runs(asked, rest, texts, scheme))]
    _write_figures(asked, found)
    if asked.html:
        write_text(asked.html, page(found[0]))
    measured = [] if asked.gate is None else found[0].kernels
    beyond = [f"beyond the gate of {asked.gate:g} nats: {x.name}" for x in measured if x.found.rms > asked.gate]
    return "\n".join([*map(str, found), *beyond]), all(found) and not beyond


@cache
def loaded(folder: Path, rest: Dtype = "fp32") -> LanguageModel:
    """Return the model of a folder of Transformers, once a process."""
    return LanguageModel(AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True), rest)


def _run(folder: Path, rest: Dtype, *text: Any, **how: Any) -> list[RunOfText]:
    return run_text(loaded(folder, rest), *text, **how)


def _explained(asked: LogprobsRequest, *dumps: Path) -> tuple[str, bool]:
    """Explain two dumps, and write the figures where that is asked for."""
    rest: Dtype = asked.rest or "bf16"
    first, second = (read(file, asked.tokens) for file in dumps)
    found = explain(loaded(asked.model, rest), first, second, seed=asked.seed)
    _write_figures(asked, [found])
    if asked.html:
        own = LogprobsRun(model=str(asked.model), rest=rest, texts=len(first), kernels=())
        write_text(asked.html, page(own, {str(each): each.z for each in found.suspects}, f"{asked.model}: {found}."))
    return str(found), bool(found)


def _runs(
    asked: LogprobsRequest, rest: Dtype, texts: Sequence[torch.Tensor], scheme: QuantScheme | None
) -> list[list[RunOfText]]:
    """Run every text under every kernel, in a process a core where there are several texts.

    ValueError for what a model or kernel refuses; TaskError for a process that is lost.
    """
    run = partial(
        _run,
        asked.model,
        rest,
        kernels=asked.kernels,
        scheme=scheme,
        draws=2 if len(texts) == 1 else 1,
        by_token=asked.by_token,
    )
    given = [text.numpy() for text in texts], range(asked.seed, asked.seed + len(texts))
    workers = min(asked.workers or default_workers(), len(texts))
    if workers == 1:
        return [*map(run, *given)]
    try:
        with processes(workers) as pool:
            return [*pool.map(run, *given)]
    except TaskError as error:
        raise ValueError(str(error)) if error.raised == "ValueError" else error from error


def _write_figures(asked: LogprobsRequest, found: Sequence[Any]) -> None:
    if asked.json:
        write_text(asked.json, json_text({"schema": "fa3verify.logprobs/1", "found": _plain([*found])}))


def _plain(value: Any) -> Any:
    """Return records as JSON has them; variances are a list, each with its place."""
    if isinstance(value, Mapping):
        return [{**place._asdict(), "variance": x} for place, x in value.items()]
    if isinstance(value, Divergence | Suspect):
        return value._asdict()
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return [_plain(x) for x in value] if isinstance(value, tuple | list | np.ndarray) else value
