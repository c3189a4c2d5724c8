"""README and docs: examples work as printed, links lead somewhere, and the modules they name exist."""

from __future__ import annotations

import doctest
import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3verify.cli.main import main

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CHANGELOG.md", ROOT / "reference" / "README.md", *sorted((ROOT / "reports").rglob("*.md"))]
ROOMS = ("", "kernels", "simulator", "reference", "kernels/fa3_kernels", "simulator/fa3_simulator")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_python_examples_print_what_the_page_shows(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert failed == 0


def transcripts() -> list[tuple[str, list[tuple[str, str]]]]:
    """Every block marked ``console``: its commands, each with the output printed below it."""
    return [
        (relative(page), re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE))
        for page in GUIDES
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize(("page", "commands"), transcripts(), ids=lambda value: value if type(value) is str else "")
def test_the_commands_of_a_block_print_what_the_page_shows(page, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands
    for command, output in commands:
        program, *arguments = shlex.split(command)
        assert program == "fa3verify", f"{page}: a command of another program goes into a block marked sh"
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[: len(output.splitlines())] == output.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not os.path.exists(page.parent / link)]
    assert not missing


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_modules_that_a_page_names_exist(page):
    named = re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text())
    ours = [name for name in named if "/" in name and not name.startswith("out/")]
    missing = [name for name in ours if not any((ROOT / room / name).exists() for room in ROOMS)]
    assert not missing
