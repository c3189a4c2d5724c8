"""``fa3verify check`` reads the tensors of a call from any of three kinds of files, and none of them by pickle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem
from fa3verify.cli.main import main

PROBLEM = AttentionProblem(1, 2, 1, 30, 50, 16, causal=True)
NAMES = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", FORMATS["bf16"].dtype: "BF16"}


def tensors(dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    fmt = FORMATS[dtype].dtype
    q, k, v = (rng.normal(size=s).astype(fmt) for s in (PROBLEM.q_shape, PROBLEM.k_shape, PROBLEM.v_shape))
    return {"q": q, "k": k, "v": v, "out": attention(PROBLEM, q, k, v).out.astype(fmt)}


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the format by its description: the length of the header, the header, the bytes of the arrays."""
    header: dict[str, object] = {"__metadata__": {"by": "a test"}}
    data = b""
    for name, x in arrays.items():
        raw = np.ascontiguousarray(x).tobytes()
        ends = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES.get(x.dtype, "C64"), "shape": list(x.shape), "data_offsets": ends}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["check", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_dump_is_judged_as_its_tensors_are(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"dump.{kind}"
    arrays = tensors("fp16" if kind == "npz" else "bf16")
    for factor, code, word in ((1.0, 0, "PASS, nothing wrong in 60 of 60 rows"), (1.03, 1, "FAIL, errors in 60 of 60")):
        stored = arrays | {"out": (factor * arrays["out"].astype(np.float32)).astype(arrays["out"].dtype)}
        np.savez(path, **stored) if kind == "npz" else write_safetensors(path, stored)  # type: ignore[arg-type]
        found, text = run(path, "--layout", "bshd", "--causal", "--rows", "all")
        assert (found, text[: len(word)]) == (code, word)
    assert run(path, "--layout", "bshd", "--causal", "--top-left")[0] == 1


def test_scalars_in_a_dump_are_facts_of_the_call_and_options_go_first(tmp_path: Path) -> None:
    path = tmp_path / "dump.npz"
    np.savez(path, **tensors("fp16"), causal=np.array(True), layout=np.array("bshd"), softmax_scale=np.array(0.25))  # type: ignore[arg-type]
    assert run(path)[0] == 0
    code, text = run(path, "--softmax-scale", 1.0, "--json", "-")
    assert (code, json.loads(text)["explained"]) == (1, "would be right with softmax_scale=1 / sqrt(head_dim)")
    assert run(path, "--top-left") == (6, run(path, "--top-left")[1])


@pytest.mark.optional
def test_a_dump_of_torch_is_read_without_pickle(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "dump.pt"
    torch.save({name: torch.from_numpy(x) for name, x in tensors("fp16").items()}, path)
    assert run(path, "--layout", "bshd", "--causal")[0] == 0
    torch.save({"q": Path}, path)
    assert run(path, "--layout", "bshd")[0] != 0


@pytest.mark.parametrize(
    ("name", "rule"), [("dump.json", "must end in"), ("dump.npz", "allow_pickle"), ("dump.safetensors", "got C64")]
)
def test_a_file_that_cannot_be_read_safely_is_refused_with_the_rule(tmp_path: Path, name: str, rule: str) -> None:
    path = tmp_path / name
    if path.suffix == ".npz":
        np.savez(path, q=np.array([object()]))
    elif path.suffix == ".safetensors":
        write_safetensors(path, {"q": np.zeros(2, np.complex64)})
    else:
        path.write_text("{}")
    code, text = run(path)
    assert code == 2
    assert rule in text
