"""FlashAttention-4, written in the CuTe DSL, on SM90."""

from __future__ import annotations

import site
from collections.abc import Mapping
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify.adapters.launches import Forward, Given, Launch, Output
from fa3verify.adapters.libraries import folder


def load(name: str) -> Forward:
    """Import the package, installed or from ``fa4`` in the peers' folder."""
    where = folder()
    if where is not None and (where / "fa4").is_dir():
        site.addsitedir(str(where / "fa4"))  # with its .pth files: the DSL lies in a folder of its own
    from flash_attn.cute.interface import _flash_attn_fwd  # pyright: ignore[reportMissingImports]

    def prepare(problem: AttentionProblem, given: Given, options: Mapping[str, Any]) -> Launch:
        scale, is_plain = problem.softmax_scale, not options.get("lse", True)

        def launch() -> Output:
            found = _flash_attn_fwd(*given[:3], softmax_scale=scale, causal=problem.causal, return_lse=not is_plain)
            return Output(found[0], None if is_plain else found[1])

        return launch

    return prepare
