"""What a kernel raises: its traceback in findings, pages, replay files and on the console, bounded and harmless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from markupsafe import escape

from fa3verify import text
from fa3verify.cli.main import main
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels import calls
from fa3verify.public import AttentionProblem, judge, kernel
from fa3verify.tensors import interpreter

RAISING = """\
import fa3verify


def softmax(x):
    raise RuntimeError(f"<b>no & of {x.shape}\\x1b[2J")


@fa3verify.kernel(library="numpy", features=())
def attention(q, k, v, *, softmax_scale):
    out = softmax(q) @ v
    return out
"""
FRAME = 'raises_here.py:5 in softmax: raise RuntimeError(f"<b>no & of {x.shape}\\x1b[2J")'


def raised(function, *arguments) -> dict[str, str] | None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (whatever a kernel raises)
        function(*arguments)
    return text.of_traceback(caught.value)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A campaign of one family on a kernel that raises: what was printed, and the folder of its report."""
    folder = tmp_path_factory.mktemp("raising")
    (folder / "raises_here.py").write_text(RAISING)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(folder))
        part = ["--family", "normal", "--property", "error_within_bound"]
        options = ["--quick", "--workers", "1", "--out", "out", "--quiet"]
        done = CliRunner().invoke(main, ["verify", "raises_here.py:attention", *part, *options])
        replays = sorted((folder / "out" / "worst").glob("fail-*.json"))
        again = [CliRunner().invoke(main, ["replay", str(path)]) for path in replays]
    assert done.exit_code == 1, done.output
    return done.stdout, folder / "out", replays, again


def test_the_console_and_the_markdown_name_the_last_frame(judged):
    printed, out, _, _ = judged
    shown = FRAME.replace("\x1b", "\\x1b")
    assert f"     raised at: {shown}\n" in printed
    assert f" raised at {escape(shown)}</summary>\n" in (out / "report.md").read_text()


def test_findings_and_replay_files_have_the_traceback_from_the_users_first_frame(judged):
    _, out, replays, _ = judged
    failures = json.loads((out / "summary.json").read_text())["failures"]
    stored = [json.loads(path.read_text())["traceback"] for path in replays]
    assert {found["what"].split()[0] for found in failures} == {"family", "law"}
    for each in (*(found["traceback"] for found in failures), *stored):
        lines = each["text"].splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[1].endswith('raises_here.py", line 10, in attention')
        assert "out = softmax(q) @ v" in lines[2]
        assert lines[-1].startswith("RuntimeError: <b>no & of (")
        assert lines[-1].endswith("\\x1b[2J")


def test_the_page_has_the_traceback_escaped(judged):
    page = (judged[1] / "report.html").read_text()
    assert "in attention\n    out = softmax(q) @ v" in page
    assert "RuntimeError: &lt;b&gt;no &amp; of (" in page
    assert "<b>no" not in page + (judged[1] / "report.md").read_text()


def test_a_replay_prints_the_traceback_again(judged):
    for done in judged[3]:
        assert done.exit_code == 1
        assert "line 10, in attention\n    out = softmax(q) @ v" in done.stdout


def deep(n: int):
    return deep(n - 1) if n else {}[text.MOST * "x"]


def endless(n: int):
    return shallow(n - 1) if n % 2 else deeper(n - 1)


def deeper(n: int):
    raise ValueError("x\n" * 10**6) if not n else endless(n)


def shallow(n: int):
    return deeper(n)


@pytest.mark.parametrize(("function", "n"), [(deep, 500), (endless, 300)])
def test_a_traceback_is_bounded_and_keeps_both_ends(function, n):
    found = raised(function, n)
    assert len(found["text"]) <= text.MOST_OF_TRACEBACK
    assert found["text"].startswith("Traceback (most recent call last):")
    assert len(found["frame"]) <= text.MOST + 10
    assert all(c.isprintable() or c == "\n" for c in found["text"])


def test_an_exception_without_a_text_has_its_traceback_all_the_same():
    class Mute(Exception):
        @property
        def __notes__(self):
            raise SystemExit

        def __str__(self) -> str:
            raise SystemExit

    def fails():
        raise Mute

    found = raised(fails)
    assert found["text"].splitlines()[-1].startswith("Mute: Mute without a text")
    assert found["frame"].endswith("in fails: raise Mute")


def test_the_last_frame_is_of_the_users_code_where_a_library_raises():
    def calls_a_library():
        json.loads("{")

    found = raised(calls_a_library)
    assert found["frame"].startswith(f"{Path(__file__).name}:")
    assert found["frame"].endswith('in calls_a_library: json.loads("{")')
    assert "decoder.py" in found["text"]


def test_what_the_harness_finds_wrong_has_no_traceback():
    def shapeless(q, k, v, *, softmax_scale):
        return q[:1, :1, :1]

    (made,) = kernel(library="numpy", features=())(shapeless).__fa3verify_kernels__
    with pytest.raises(calls.KernelError) as caught:
        judge(made, AttentionProblem(1, 1, 1, 8, 8, 64), Recipe("normal"))
    assert caught.value.failure == text.Failure(str(caught.value))


@pytest.mark.parametrize(("variable", "hinted"), [(None, True), ("0", True), ("1", False)])
@pytest.mark.parametrize("words", ["0 active drivers ([]).", "argument cannot be accessed from Triton (cpu tensor?)"])
def test_a_triton_kernel_without_a_gpu_is_told_of_the_interpreter(words, variable, hinted, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(interpreter, "_corrected", lambda: None)  # corrections would stay in this process
    if variable is not None:
        monkeypatch.setenv("TRITON_INTERPRET", variable)

    def launches(q, k, v, *, softmax_scale):
        raise ValueError(words)

    (made,) = kernel(library="numpy", features=())(launches).__fa3verify_kernels__
    with pytest.raises(calls.KernelError) as caught:
        judge(made, AttentionProblem(1, 1, 1, 8, 8, 64), Recipe("normal"))
    assert ("TRITON_INTERPRET=1" in str(caught.value)) == hinted
