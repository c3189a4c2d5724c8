"""Does the Hadamard rotation help on real activations? Gain of every stored head, measured and predicted.

gain = RMSE(one scale per head) / RMSE(Hadamard and scales per 128 rows), both by the e4m3 twin against the unrounded
inputs, geometric mean over sign vectors; the prediction is :func:`fa3_reference.bounds.quantisation.predict_error`.
Differences below a quarter on one head are within the luck of a sign vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds.quantisation import predict_error
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme, prepare
from fa3_reports.studies import drawn_fp8, tables
from fa3_reports.studies.study import Records, Study, meaning, texts
from fa3verify.campaign.profiles import ProfileName
from fa3verify.files import Json
from fa3verify.inputs import activations, captures

PLAIN = QuantScheme("head")


TOKENS: dict[ProfileName, int] = {"quick": 192, "release": 0, "soak": 0}  # of each text the leading ones; 0 is all
SIGNS: dict[ProfileName, int] = {"quick": 2, "release": 4, "soak": 16}  # vectors of signs


def _rmse(
    problem: AttentionProblem, arrays: Sequence[np.ndarray], truth: np.ndarray, scheme: QuantScheme
) -> np.ndarray:
    """RMSE of each query head."""
    q, k, v = arrays
    out = forward(problem, prepare(problem, q, k, v, scheme).operands).out.astype(np.float64)
    return np.sqrt(np.mean(np.square(out - truth), axis=(0, 1, 3)))


def gains(name: str, tokens: int, signs: int) -> Records:
    """Return measured and predicted gain of every head of one stored file."""
    case = activations.find(name)
    problem, *arrays = captures.load(name, dtype="e4m3", tokens=min(tokens, case.seqlen))
    q, k, v = arrays
    truth = attention(problem, q, k, v).out
    plain = _rmse(problem, arrays, truth, PLAIN)
    rotated = [_rmse(problem, arrays, truth, QuantScheme("block", hadamard_seed=s)) for s in range(signs)]
    predicted_plain = predict_error(problem, q, k, v, PLAIN).total[0]
    predicted = predict_error(problem, q, k, v, QuantScheme("block", hadamard_seed=0)).total[0]
    level = np.sqrt(np.mean(np.square(truth), axis=(0, 1, 3)))
    mean = np.exp(np.mean(np.log(rotated), axis=0))
    return [
        {
            "head": f"{case.model.split('-')[0]} layer {case.layer} head {head}",
            "model": case.model,
            "file": name,
            "tokens": problem.seqlen_k,
            "signs": signs,
            "rel_rmse_plain": float(plain[i] / level[i]),
            "rel_rmse_rotated": float(mean[i] / level[i]),
            "gain": float(plain[i] / mean[i]),
            "gain_predicted": float(predicted_plain[i] / predicted[i]),
        }
        for i, head in enumerate(case.q_heads)
    ]


def units(profile: ProfileName, seed: int) -> list[Json]:
    """Return one unit per stored file; the data are real and the sign vectors fixed, so ``seed`` has no effect."""
    return [
        {"name": case.name, "tokens": TOKENS[profile], "signs": SIGNS[profile]}
        for case in activations.list_activations()
    ]


_MEANINGS = {
    "gain": "RMSE with one scale per head over RMSE with rotation and 128-row scales; above 1 rotation helps",
    "gain_predicted": "the same by the first-order error model",
    "rel_rmse_plain": "relative RMSE with one scale per head",
    "rel_rmse_rotated": "relative RMSE with rotation and scales per 128 rows",
    "tokens": "leading tokens used",
}


def dataset(records: Records) -> xr.Dataset:
    """Return the gains by head."""
    data = xr.Dataset(
        {name: ("head", [r[name] for r in records], meaning(told)) for name, told in _MEANINGS.items()},
        {"head": texts(r["head"] for r in records)},
    )
    data["model"] = ("head", texts(r["model"] for r in records), {"long_name": "pretrained model"})
    data["file"] = ("head", texts(r["file"] for r in records), {"long_name": "stored activation"})
    with np.errstate(divide="ignore"):
        correlation = float(np.corrcoef(np.log(data.gain), np.log(data.gain_predicted))[0, 1])
    data.attrs = {
        "title": "gain of the Hadamard rotation on real activations",
        "comment": f"{len(records)} heads of {len(set(data.model.values))} models, first {int(data.tokens.min())} to "
        f"{int(data.tokens.max())} tokens, {records[0]['signs']} sign vectors",
        "geometric_mean_gain": float(np.exp(np.mean(np.log(data.gain)))),
        "log_correlation": correlation,
    }
    return data


STUDY = Study(
    "rotation",
    gains,
    units,
    dataset,
    draw=drawn_fp8.rotation,
    title="Rotation on real activations: gains and losers",
    reading="Gain = RMSE with one scale per head over RMSE with Hadamard rotation and 128-row scales. Below 1 the "
    "rotation hurts. Differences under a quarter on one head are within the luck of a sign vector.",
    table=tables.losers,
)
