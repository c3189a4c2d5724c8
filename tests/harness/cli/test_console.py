"""The terminal: nothing is cut that says what was found, at 40 columns and at 80; progress has words from the start."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fa3verify.campaign.tasks import CallTask, Outcome
from fa3verify.cli import console, exits
from tests.harness.report.fake_summary import read, summary

WIDTHS = (40, 80, 120)


@pytest.mark.parametrize("width", [34, 35, 38, 39, *WIDTHS])
def test_the_table_of_a_kernel_fits_and_cuts_no_figure(width):
    text = io.StringIO()
    terminal = Console(file=text, width=width)
    for kernel in read(summary()).kernels:
        terminal.print(console._family_table(kernel, width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for line in lines:
        assert "…" not in line[len(line.split("…")[0]) + 1 :], line
        assert not re.search(r"\d…", line), line
    assert "bound" in text.getvalue()
    assert "…" not in "".join(text.getvalue().partition("───")[0].splitlines()), text.getvalue()  # the headings


def test_a_family_of_which_nothing_was_compared_has_dashes_for_figures():
    body = summary(kernels=("twin.fp16",))
    row = body["kernels"][0]["families"][0]
    row["unbounded"] = row["outputs"]
    text = io.StringIO()
    (kernel,) = read(body).kernels
    Console(file=text, width=80).print(console._family_table(kernel, 80))
    found = {words[0]: words[1:] for line in text.getvalue().splitlines() if (words := line.split())}
    assert set(found[row["family"]]) == {"-"}
    assert len(found[row["family"]]) == len(found[body["kernels"][0]["families"][1]["family"]])


def test_the_verdict_is_emphasised_and_no_number_beside_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    body = summary()
    for kernel in body["kernels"]:
        kernel["inconclusive"] = None
    console.print_run(read(body), tmp_path, quiet=True)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "VERIFY" in line)
    verdict, judged = line.rsplit("\x1b[0m", 1)
    assert "VERIFY" in verdict
    assert re.fullmatch(r" [\d,]+ kernels?, [\d,]+ cases?, [\d,]+ outputs in \d+ s", judged)


@pytest.mark.parametrize(("columns", "letters"), [(40, 26), (80, 66), (200, 100)])
def test_a_picture_in_text_fits_the_terminal(columns, letters, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert exits.letters() == letters


@pytest.mark.parametrize("width", WIDTHS)
def test_progress_says_what_it_does_how_much_is_done_and_fits(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    task = CallTask("twin.e4m3_chained: activations:SmolLM2-135M-Instruct", print, {})
    with console.progress(quiet=False) as advance:
        advance(336, None)
        advance(336, Outcome(task))
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", x) for x in re.split(r"[\r\n]+", capsys.readouterr().err)]
    frames = [frame.rstrip() for frame in frames if frame.strip()]
    assert max(map(len, frames)) <= width
    assert frames[0].startswith("loading the k"[: width - 24])
    assert "1/336" in frames[-1]
    assert "left" in frames[-1]
    assert "\x1b[3" not in capsys.readouterr().err
