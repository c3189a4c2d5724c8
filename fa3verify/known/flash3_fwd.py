"""Official FlashAttention-3 in BF16 and FP8, from the operator library of wheel fa3-fwd."""

from __future__ import annotations

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Forward, Given, Launch, LaunchOutput, Options
from fa3verify.known.libraries import library
from fa3verify.known.peers import PEERS


def load(name: str) -> Forward:
    """Load the library's operators."""
    torch.ops.load_library(str(library(PEERS[name].binary)))
    return prepare


def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
    """Prepare a call. The options are num_splits, 1 by default, and pack_gqa; at num_splits 0, and without pack_gqa,
    the library chooses.
    """
    packed = {
        "cu_seqlens_q": given.cu_seqlens_q,
        "cu_seqlens_k": given.cu_seqlens_k,
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
    }
    descales = {name: getattr(given, name) for name in ("q_descale", "k_descale", "v_descale")}

    def launch() -> LaunchOutput:
        results = torch.ops.fa3_fwd.fwd(
            given.q,
            given.k,
            given.v,
            **(packed if problem.is_varlen else {}),
            **{name: x for name, x in descales.items() if x is not None},
            softmax_scale=problem.softmax_scale,
            is_causal=problem.causal,
            window_size_left=problem.window[0],
            window_size_right=problem.window[1],
            softcap=problem.softcap,
            num_splits=options.get("num_splits", 1),
            pack_gqa=options.get("pack_gqa"),
        )
        return LaunchOutput(results[0], results[1])

    return launch
