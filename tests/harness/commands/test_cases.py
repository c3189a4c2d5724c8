"""A folder of cases is judged as a kernel that is called, by whatever program filled it in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_reference.formats import FORMATS, encode
from fa3verify.campaign.introduction import found, introduce
from fa3verify.campaign.plan import JudgeFamily, SearchLaw, plan
from fa3verify.cli.main import main
from fa3verify.commands.cases import write
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.filled import CaseFolder
from fa3verify.kernels.record import Kernel, Unfilled
from fa3verify.properties import run_law
from fa3verify.properties.law import Setup, set_up
from fa3verify.properties.table import LAWS
from tests.harness.commands.filling import attention, fill, read

ROOT = Path(__file__).parents[3]
SMALL = "max_seqlen_k=140,max_seqlen_q=70,max_nheads=4,max_batch=2"
# Of a campaign: what sees most, in a second or two.
FEW = ("special_values_follow_policy", "cover", "normal", "a_lone_key_returns_its_value", "error_within_bound")


def declared(
    like: str = "flash_attn_func", dtype: str = "fp16", said: str = f"@16[features=causal+gqa+window,{SMALL}]"
):
    return {"like": like, "dtype": dtype, "accumulator": None, "said": said, "seed": 0}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which nothing is filled in."""
    folder = tmp_path_factory.mktemp("cases") / "cases"
    count, size = write(folder, declared(), lambda label: None)
    assert count == len((folder / "cases.jsonl").read_text().splitlines()) > 300
    assert size == sum(file.stat().st_size for file in folder.glob("*/*.bin"))
    return folder


@pytest.fixture
def folder(empty: Path, tmp_path: Path) -> Path:
    return shutil.copytree(empty, tmp_path / "cases")


def findings(folder: Path, few: tuple[str, ...] = FEW) -> list[str]:
    """Judge some tasks of a campaign, and return what is found first, or nothing."""
    kernel = introduce(CaseFolder(folder).name, "quick")
    assert kernel.failed is None
    for task in plan([kernel], "quick", 0, is_fail_fast=True):
        value: Any = task.run() if task.label.endswith(few) else None
        if value is not None and task.is_finding(value):
            errors = [str(record.error) for record in getattr(value, "records", ()) if record.error]
            return [task.label, str(getattr(value, "message", "")), *errors]
    return []


@pytest.mark.nightly
def test_right_programs_pass_in_any_order_of_their_sums(folder: Path) -> None:
    for program in (attention, partial(attention, order=-1, weights=np.float16)):
        fill(folder, program)
        assert findings(folder) == []


MUSEUM: dict[str, Any] = {  # what is wrong, and the program that does it
    "scale": {"scale": 1.01},
    "causal mask one key late": {"shift": 1},
    "window one key short": {"left": 1},
    "last key dropped": {"hides": lambda keys, n: (keys == n - 1) & (n > 1)},
    "first key of the second tile dropped": {"hides": lambda keys, n: keys == 128},
    "kv head by remainder": {"by_remainder": True},
    "lse in base 2": {"base": 2},
    "sums in fp16": {"sums": np.float16},
    "weights of 7 bits": {"weights": FORMATS["bf16"].dtype},
    "NaN in V dropped": {"drops_nan": True},
    "mask added to scores": {"adds_mask": True},
}
MUSEUM_OF_OUTPUTS: dict[str, Any] = {
    "buffer of the case before": lambda out, before: before,
    "row at the edge of a tile is the one before": lambda out, before: (
        np.concatenate([out[:, :64], out[:, 63:64], out[:, 65:]], 1) if out.shape[1] > 64 else out
    ),
    "sequences swapped": lambda out, before: out[::-1],
    "heads in front of queries": lambda out, before: out.swapaxes(1, 2),
    "another channel": lambda out, before: np.roll(out, 1, axis=-1),
    "cut off, not rounded": lambda out, before: (out.view(np.uint16) & 0xFFFE).view(np.float16),
}


OFTEN = ("kv head by remainder", "lse in base 2", "last key dropped")  # the others are nightly


@pytest.mark.parametrize("what", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.nightly) for x in MUSEUM])
def test_a_wrong_program_is_found_by_its_files(what: str, folder: Path) -> None:
    fill(folder, partial(attention, **MUSEUM[what]))
    assert findings(folder, FEW[:1] if "NaN" in what or "mask added" in what else FEW)


@pytest.mark.parametrize("what", MUSEUM_OF_OUTPUTS)
def test_wrong_bookkeeping_of_outputs_is_found(what: str, folder: Path) -> None:
    fill(folder, wrong=MUSEUM_OF_OUTPUTS[what])
    assert findings(folder)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_program_of_the_page_passes_and_its_planted_fault_is_found(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cases.md").read_text()
    (source,) = re.findall(r"^```cpp\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    folder = tmp_path / "cases"
    write(folder, declared(dtype="fp32", said=f"@16[features=causal+gqa,{SMALL}]"), lambda label: None)
    for right, planted in (("", ""), ("h / (nheads / nheads_kv)", "h % nheads_kv")):
        assert right in source
        (tmp_path / "attention.cpp").write_text(source.replace(right, planted) if right else source)
        subprocess.run(["c++", "-O1", "-Wall", "-Werror", "-o", "attention", "attention.cpp"], cwd=tmp_path, check=True)
        subprocess.run(["./attention", "cases"], cwd=tmp_path, check=True)
        assert bool(findings(folder)) is bool(right)


def test_nothing_passes_until_every_case_is_filled_in(empty: Path, folder: Path) -> None:
    count = len((empty / "cases.jsonl").read_text().splitlines())
    narrowed = f"{count:,} of {count:,} cases are not filled in"
    assert introduce(CaseFolder(empty).name, "quick").narrowed == narrowed
    assert findings(empty) == []
    fill(folder)
    assert introduce(CaseFolder(folder).name, "quick").narrowed is None
    gone = next(folder.glob("*/out.bin"))
    gone.unlink()
    assert "1 of " in str(introduce(CaseFolder(folder).name, "quick").narrowed)


def test_a_case_that_is_not_filled_in_counts_as_no_trial(empty: Path) -> None:
    (kernel,) = [introduce(CaseFolder(empty).name, "quick")]
    for task in plan([kernel], "quick", 0):
        if task.label.endswith(FEW):
            value: Any = task.run()
            tried = value.examples if isinstance(task, SearchLaw) else len(value.records)
            assert tried == 0


def first_of_normal(empty: Path) -> str:
    """Return the name of the first case of a family, which a folder without outputs tells."""
    kernel = introduce(CaseFolder(empty).name, "quick")
    (task,) = (task for task in plan([kernel], "quick", 0) if isinstance(task, JudgeFamily) and task.family == "normal")
    with pytest.raises(Unfilled) as missing:
        set_up(found(kernel.name), task.cases(found(kernel.name))[0]).run()
    return Path(str(missing.value).split()[0]).parent.name


def damaged(folder: Path, case: str, how: str) -> None:
    """Change one thing of a case in a folder that was filled in."""
    lines = (folder / "cases.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["case"] == case)
    own = folder / json.loads(lines[at])["case"]
    if how == "operand":
        content = bytearray((own / "k.bin").read_bytes())
        content[5] ^= 1
        (own / "k.bin").write_bytes(content)
    elif how == "fact":
        lines[at] = lines[at].replace('"causal": true', '"causal": false')
    elif how == "line":
        del lines[at]
    elif how == "swapped":
        other = folder / json.loads(lines[at - 1])["case"]
        other.rename(folder / "aside")
        own.rename(other)
        (folder / "aside").rename(own)
    elif how == "declaration":
        text = (folder / "declared.json").read_text()
        (folder / "declared.json").write_text(text.replace('"accumulator": null', '"accumulator": "wgmma"'))
    else:
        (own / "out.bin").write_bytes((own / "out.bin").read_bytes()[:-2])
    (folder / "cases.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("operand", "has another k than was written"),
        ("fact", "has no line of case"),
        ("line", "has no line of case"),
        ("declaration", "has no line of case"),
        ("swapped", "has another q than was written"),
        ("size", "out.bin has 8,958 bytes, and fp16 1 70 4 16 are 8,960"),
    ],
)
def test_what_was_changed_in_a_folder_is_a_finding_in_words(how: str, words: str, empty: Path, folder: Path) -> None:
    fill(folder)
    damaged(folder, first_of_normal(empty), how)
    label, *told = findings(folder, ("normal",))
    assert label.endswith("normal")
    assert any(words in each for each in told)


@pytest.mark.nightly
@pytest.mark.optional
def test_torchs_attention_passes_by_files_too(tmp_path: Path) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    folder = tmp_path / "cases"
    write(folder, declared("sdpa", said=f"@16[features=causal+gqa,min_seqlen=1,{SMALL}]"), lambda label: None)
    for line in (folder / "cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        own = folder / case["case"]
        q, k, v = (torch.from_numpy(read(own, name, case[name])) for name in "qkv")
        facts = {"is_causal": case["causal"], "scale": case["softmax_scale"], "enable_gqa": q.shape[1] != k.shape[1]}
        scaled_dot_product_attention(q, k, v, **facts).numpy().tofile(own / "out.bin")
    assert findings(folder, ("cover", "peaky", "error_within_bound", "a_lone_key_returns_its_value")) == []


@pytest.mark.nightly
def test_an_lse_that_is_left_out_everywhere_is_no_finding(folder: Path) -> None:
    fill(folder)
    for file in folder.glob("*/lse.bin"):
        file.unlink()
    assert findings(folder) == []


CONVENTIONS = {
    "flash_attn_func": "causal+gqa+window+softcap+alibi",
    "flash_attn_varlen_func": "varlen+causal+gqa",
    "flash_attn_with_kvcache": "causal+gqa+paged+seqused_k",
    "sdpa": "causal+gqa+bias+attn_mask",
}


def near(kernel: Kernel) -> Kernel:
    """Return a kernel that asks an empty folder, and returns what is right but for its last bits."""

    def run(problem: Any, operands: Any, config: Any) -> dict[str, np.ndarray]:
        with suppress(Unfilled):
            kernel.code.run(problem, operands, config)
        truth = Setup(kernel, problem, operands, config).truth()
        found = {}
        for name, fmt, size in (("out", config.out_dtype, 2.0**-14), ("lse", "fp32", 2.0**-24)):
            with np.errstate(invalid="ignore"):
                off = truth[name] * (1 + size * (-1) ** np.arange(truth[name].size).reshape(truth[name].shape))
            found[name] = encode(off, FORMATS[fmt], "ieee")
        return found

    return kernel.altered(run=run)


@pytest.mark.nightly
@pytest.mark.parametrize("like", CONVENTIONS)
def test_no_call_of_a_property_depends_on_what_was_returned(like: str, tmp_path: Path) -> None:
    """The calls that were drawn by exact outputs are those that a campaign makes of other ones."""
    said = f"@16[features={CONVENTIONS[like]},{SMALL}]"
    write(tmp_path / "cases", declared(like, said=said), lambda label: None)
    name = CaseFolder(tmp_path / "cases").name
    kernel = near(found(name))
    asked = [law for law in LAWS if law.name in introduce(name, "quick").laws]
    assert len(asked) >= 15
    for law in asked:
        outcome = run_law(law, kernel, max_examples=6, seed=0, shrink_seconds=0)
        assert outcome.status != "fail", outcome.message


@pytest.mark.nightly
def test_a_folder_is_found_from_wherever_it_lies(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder)
    moved = folder.rename(tmp_path / "another")
    monkeypatch.chdir(moved)
    for path in (Path(), moved):
        assert findings(path, ("cover",)) == []


def test_another_contract_asks_nothing_that_the_folder_does_not_have(folder: Path) -> None:
    """A call that only the contract draws says nothing, where the folder's own campaign would miss a line."""
    (folder / "cases.jsonl").write_text("")
    name = CaseFolder(folder).name
    for asked, error in ((name, KernelError), (name.replace("max_batch=2", "max_batch=2,empty_lse=+inf"), Unfilled)):
        kernel = found(asked)
        planned = plan([introduce(name, "quick")], "quick", 0)
        case = next(task for task in planned if isinstance(task, JudgeFamily) and task.family == "normal")
        with pytest.raises(error):
            set_up(kernel, case.cases(kernel)[0]).run()


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    return result.exit_code, result.output


def test_the_verbs_refuse_in_a_line(empty: Path, tmp_path: Path) -> None:
    code, text = run("cases", "--out", empty)
    assert (code, text) == (2, f"fa3verify: {empty} has cases already: name another folder, or delete it\n")
    assert run("cases", "--like", "cudnn", "--out", tmp_path / "a")[0] == 2
    assert run("check", empty, "--causal")[0] == 2
    assert run("check", tmp_path)[0] == 3
    other = shutil.copytree(empty, tmp_path / "other")
    (other / "declared.json").write_text((other / "declared.json").read_text().replace("numpy", "numpy 1.0,"))
    code, text = run("check", other)
    assert code == 2
    assert "expected schema" in text
