"""Laws of backward kernels on inputs where gradients of released kernels were wrong: exponents far from zero, one
query, lengths that end in the middle of a tile, and the gradient of a real loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import strategies as st

from fa3verify.cases.coverage import adapted
from fa3verify.files import Json
from fa3verify.inputs.loss import readout_dout
from fa3verify.properties.compare import Found, against_truth
from fa3verify.properties.law import Setup, Trial, Untaken, Violation, set_up
from fa3verify.properties.trials import Wanted, drawn, law

_OF = ("backward",)
# By how many nats all scores of a row are moved. Where lse is below -88, exp(-lse) overflows binary32.
SHIFTS = (-100, 100, -1000, 1000)
HALF_TILES = (64, 192)  # 64 beyond a whole tile of 128, where cuDNN 9 returned NaN in dQ
MASKS: Mapping[str, Json] = {"dense": {}, "causal": {"causal": True}, "window": {"window": (33, 5)}}


def _against_truth(setup: Setup, arrays: tuple[np.ndarray, ...], what: str) -> Violation | None:
    """Compare the call on other inputs, q, k, v and dout, with the truth; out and lse are computed for them."""
    operands = setup.operation.prepare(setup.problem, arrays, None, {}).operands
    return against_truth(setup._replace(operands=operands), what)


def _far_scores(setup: Setup, trial: Trial) -> Found:
    """Use channel 0 of Q and K to add the same to all scores, which moves lse and changes no gradient but its own."""
    shift = trial.integer("shift", min(SHIFTS), max(SHIFTS))
    scale = setup.problem.softmax_scale
    q, k, v, dout = (x.copy() for x in trial.case.draw()[0])
    q[..., 0] = 2.0 ** np.round(np.log2(np.sqrt(abs(shift) / scale)))
    k[..., 0] = shift / scale / q.flat[0]
    yield _against_truth(setup, (q, k, v, dout), f"scores shifted by {shift}")


def _telling_lengths(setup: Setup, trial: Trial) -> Found:
    """Compare one query, and half a tile of them, under every mask that the kernel claims and takes here."""
    seqlen_k = trial.integer("seqlen_k", 1, max(HALF_TILES))
    kernel = setup.kernel
    masks = {name: mask for name, mask in MASKS.items() if name == "dense" or name in kernel.features}
    taken = []
    for seqlen_q, (name, mask) in product((1, 64), masks.items()):
        plain = replace(setup.problem, causal=False, window=(-1, -1), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        problem = adapted(kernel, replace(plain, **mask))
        if kernel.supports(problem):
            taken.append((f"{name}, {problem.seqlen_q} queries, {problem.seqlen_k} keys", problem))
    if not taken:
        raise Untaken("the kernel refuses every mask beside so few queries")
    for words, problem in taken:
        yield against_truth(set_up(kernel, replace(trial.case, problem=problem)), words)


def _loss(setup: Setup, trial: Trial) -> Found:
    q, k, v, _ = trial.case.draw()[0]
    with np.errstate(all="ignore"):
        dout = readout_dout(setup.problem, q, k, v, trial.case.recipe.seed)
    yield _against_truth(setup, (q, k, v, dout), "dO of a cross entropy")


_ANY = Wanted(empty=False, max_edits=0)
_PLAIN = ("normal", "peaky", "outlier_channels", "block_scaled")
GRADIENT_INPUT_LAWS = (
    law(
        "gradients_of_far_scores",
        "dQ, dK and dV lie within the bound where all scores, and so lse, are moved by 100 or 1,000 nats either way",
        "bounded",
        _far_scores,
        wanted=replace(_ANY, softcap=False, families=_PLAIN),  # a softcap would undo the shift
        parameters=drawn(shift=st.sampled_from(SHIFTS)),
        of=_OF,
    ),
    law(
        "gradients_at_telling_lengths",
        "dQ, dK and dV lie within the bound for one query and for lengths of half a tile, under every mask",
        "bounded",
        _telling_lengths,
        wanted=replace(_ANY, layout="batched", single=True, families=_PLAIN),
        parameters=drawn(seqlen_k=st.sampled_from(HALF_TILES)),
        of=_OF,
    ),
    law(
        "gradients_of_a_loss",
        "dQ, dK and dV lie within the bound where dO is that of the cross entropy of a linear readout",
        "bounded",
        _loss,
        wanted=_ANY,
        of=_OF,
    ),
)
