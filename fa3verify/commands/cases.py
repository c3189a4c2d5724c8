"""The job of ``fa3verify cases``: write the operands of a campaign for a program that is called without Python.

What is written is what the campaign itself would hand to the program, because its own tasks draw it: the cases of
families, of the covering array and of practice, and the trials of properties, whose later calls do not depend on what
earlier ones return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fa3_reference.formats import FORMATS, encode
from fa3_reference.rules import require
from fa3verify.campaign.introduction import found, introduce
from fa3verify.campaign.plan import SearchLaw, plan
from fa3verify.files import Json, write_text
from fa3verify.kernels.filled import CASES, DECLARED, SCHEMA, CaseFolder
from fa3verify.kernels.record import Unfilled
from fa3verify.properties.law import Setup, Trial, Untaken, set_up
from fa3verify.properties.runner import each_trial, find_law


def write(out: Path, declared: Json, progress: Callable[[str], None]) -> tuple[int, int]:
    """Write the operands of a quick campaign, and a line of each case.

    Parameters
    ----------
    out : Path
        The folder, without cases.
    declared : dict of str to object
        ``like``, a convention of :mod:`fa3verify.kernels.conventions` or its public function; ``dtype`` and
        ``accumulator`` of :func:`fa3verify.kernel`; ``said``, what stands behind a kernel's name, such as
        ``@128[features=causal+gqa]``; ``seed`` of the campaign.
    progress : callable
        Gets the label of each task of the campaign.

    Returns
    -------
    (int, int)
        How many cases, and the bytes of their operands.

    Raises
    ------
    ValueError
        For a folder that has cases, an unknown convention, and a misspelt declaration.
    """
    require(not any(out.glob("*/q.bin")), f"{out} has cases already: name another folder, or delete it")
    like = declared["like"].removesuffix("_func").replace("_with_", "_").replace("scaled_dot_product_attention", "sdpa")
    write_text(out / DECLARED, json.dumps({"schema": SCHEMA, **declared, "like": like}, indent=1) + "\n")
    write_text(out / CASES, "")
    folder = CaseFolder(out)
    kernel = found(folder.name)
    written: dict[str, int] = {}

    def listen(*arrays: Any, **options: Any) -> None:
        line, operands, _ = folder.case(arrays, options)
        (out / line["case"]).mkdir(exist_ok=True)
        for name, content in operands.items():
            (out / line["case"] / f"{name}.bin").write_bytes(content)
        written[f"{json.dumps(line)}\n"] = sum(map(len, operands.values()))
        raise Unfilled

    def exactly(problem: Any, operands: Any, config: Any) -> object:
        """Return what is right, so that a property goes on to its next call."""
        with suppress(Unfilled):
            listening.code.run(problem, operands, config)
        truth = Setup(kernel, problem, operands, config).truth()
        formats = {"out": config.out_dtype, "lse": "fp32"}
        return {name: encode(truth[name], FORMATS[fmt], "ieee") for name, fmt in formats.items()}

    def heed(trial: Trial) -> None:
        with suppress(Untaken):
            find_law(trial.law).check(kernel.altered(run=exactly), trial)

    listening: Any = replace(kernel, code=replace(kernel.code, function=listen))  # type: ignore[type-var]
    for task in plan([introduce(kernel.name, "quick")], "quick", declared["seed"]):
        progress(task.label)
        if isinstance(task, SearchLaw):
            each_trial(find_law(task.law), kernel, heed, task.max_examples, task.seed)
        for case in [] if isinstance(task, SearchLaw) else task.cases(listening):
            with suppress(Untaken, Unfilled):
                set_up(listening, case).run()
    write_text(out / CASES, "".join(written))
    return len(written), sum(written.values())
