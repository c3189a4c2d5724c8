"""README and docs: examples work as printed, links lead somewhere, and the modules they name exist."""

from __future__ import annotations

import ast
import doctest
import math
import os
import re
import shlex
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fa3_reports.__main__ import main as own_verbs
from fa3_reports.bench import results
from fa3_reports.bench.ratios import geometric_mean
from fa3_reports.device import keys
from fa3_reports.device.source import Source
from fa3_reports.measured import decoding
from fa3_reports.stored import read_csv
from fa3verify.cli.main import main
from fa3verify.files import PACKED

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALONE = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "THIRD_PARTY.md", "reference/README.md")]
PAGES = [*GUIDES, *ALONE, *sorted((ROOT / "reports").rglob("*.md"))]
ROOMS = ("", "kernels", "simulator", "reference", "kernels/fa3_kernels", "simulator/fa3_simulator")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_python_examples_print_what_the_page_shows(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert failed == 0


BLOCKS = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)  # each with what is printed below it
NAMED = re.compile(r"# (\w+\.py)\n")  # the first line of a file that a page shows


WHOLE_CAMPAIGN = re.compile(r"^\$ fa3verify (?:declare |verify (?!.*--(?:family|property|limit|shard)))", re.MULTILINE)


def steps(section: str) -> list[tuple[str, str]]:
    """Files that a section shows, and its commands with what they print, in order: a file has its name before it."""
    found = []
    for kind, block in BLOCKS.findall(section):
        if kind == "console":
            found.append(("", block))
        elif name := NAMED.match(block):
            found.append((name[1], block))
    return found


def transcripts() -> list[Any]:
    """Sections with blocks marked ``console``: commands and the output printed below each; a section shares a folder.

    A section that shows a file which imports torch needs it. The tutorial judges seven kernels, the page on CI
    several shards, and an order is learned from dozens of launches, which takes long, as does every whole campaign.
    """
    found = []
    for page in GUIDES:
        for section in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE):
            of_section = steps(section)
            if all(name for name, _ in of_section):
                continue
            needs_torch = any(re.search(r"^(?:import|from) torch\b", text, re.MULTILINE) for _, text in of_section)
            marks = [pytest.mark.optional] if needs_torch else []
            is_long = page.name in {"tutorial.md", "ci.md", "learn.md"} or any(
                WHOLE_CAMPAIGN.search(text) for _, text in of_section
            )
            marks += [pytest.mark.nightly] if is_long else []
            title = section.splitlines()[0].strip("# ").lower().replace(" ", "-")
            found.append(pytest.param(relative(page), of_section, id=f"{relative(page)}-{title}", marks=marks))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "of_section"), transcripts())
def test_the_commands_of_a_section_print_what_the_page_shows(page, of_section, tmp_path, monkeypatch, request):
    if request.node.get_closest_marker("nightly") is None:  # what is long has the processes that it asks for
        request.getfixturevalue("in_this_process")
    monkeypatch.chdir(tmp_path)
    for name, text in of_section:
        if name:
            Path(name).write_text(text)
            continue
        commands = COMMANDS.findall(text)
        assert commands
        for command, output in commands:
            check_command(page, command, output, monkeypatch)


def check_command(page: str, command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one command of a page, with the variables in front of it, and compare what it prints and its exit code."""
    if edits(command):
        return
    result = run(page, command, monkeypatch)
    inconclusive = {"INCONCLUSIVE": 5, "QUESTION": 6}.get(output.partition(" ")[0], 0)
    is_finding = "FAIL" in output or "NOT invariant" in output or re.match(r"\d+ findings: ", output)
    assert result.exit_code == (1 if is_finding else inconclusive), result.output
    shown = timeless(output).splitlines()
    printed = timeless(result.stdout).splitlines()
    assert printed[: len(shown)] == shown, "meant? then python -m tests.bless transcripts writes it"


def edits(command: str) -> bool:
    """Plant a mistake in a file of a page, if that is what a command does."""
    is_edit = command.startswith("sed ")
    if is_edit:
        subprocess.run(command, shell=True, check=True)
    return is_edit


def run(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Run one command of a page, with the variables in front of it."""
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    program, *arguments = words
    assert program == "fa3verify", f"{page}: a command of another program goes into a block marked sh"
    return CliRunner().invoke(main, arguments)


def renew() -> None:
    """Write what commands print into the pages, as many lines of it as a page shows, where that is something else."""
    for page, of_section in (each.values for each in transcripts()):
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            patch.chdir(folder)
            for name, text in of_section:
                if name:
                    Path(name).write_text(text)
                for command, output in [] if name else COMMANDS.findall(text):
                    if edits(command):
                        continue
                    lines = output.splitlines(keepends=True)
                    printed = "".join(run(page, command, patch).stdout.splitlines(keepends=True)[: len(lines)])
                    if timeless(printed) != timeless(output):
                        shown = f"$ {command}\n"
                        written = (ROOT / page).read_text().replace(shown + output, shown + printed)
                        (ROOT / page).write_text(written)


def timeless(text: str) -> str:
    """Return an output without what follows from the machine: how long it took, how much was tried in that time, and
    what rounding in its own matrix products costs a kernel that uses them. Shrinking ends by time, and with it which
    element of an FP8 cache is told, under which hypothesis.
    """
    text = re.sub(r"(dequantises to: out)\[.*", r"\1 N", text)
    text = re.sub(r"in \d+ s$", "in N s", text, flags=re.MULTILINE)
    text = re.sub(r"[\d,]+ calls;", "N calls;", text)
    text = re.sub(r"^(VERIFY \w+ \d+ kernels?), \d+ cases", r"\1, N cases", text, flags=re.MULTILINE)
    of_ones_own = r"^(my\w+\.py:\S+ loses) [\d.]+ (bits over the ideal \w+ kernel), most in \w+: [\d.]+$"
    return re.sub(of_ones_own, r"\1 N \2", text, flags=re.MULTILINE)


def test_the_first_screens_of_the_readme_judge_tensors_judge_a_kernel_and_time_a_pipeline():
    head, *screens = re.split(r"^(?=## )", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert "![" in head
    told = ("- **A pass says**", "- **A pass says nothing**", "- **The last line compares**")
    wanted = (
        ("## Judge tensors in hand", ">>> print(fa3verify.check(", "FAIL, errors in"),
        ("## Judge your own kernel", "# mykernel.py", "$ fa3verify verify mykernel.py", "VERIFY PASS", *told),
        ("## Time a pipeline", "$ fa3verify tune", "Take "),
    )
    for lines, screen in zip(wanted, screens, strict=False):
        assert len(screen.splitlines()) <= 40
        for line in lines:
            assert any(each.startswith(line) for each in screen.splitlines()), line


def test_a_release_of_the_changelog_is_a_screen_and_all_of_it_a_page():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.encode()) <= 8192
    for release in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]:
        assert len([line for line in release.splitlines()[1:] if line.strip()]) <= 15, release.splitlines()[0]


def prose(page: Path) -> str:
    """Return a page without its blocks of code, in which brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_links_lead_to_files():
    missing = [
        f"{relative(page)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose(page))
        if "://" not in link and not os.path.exists(page.parent / link)
    ]
    assert not missing


OFFICIAL = re.compile(r"official FlashAttention-3", re.IGNORECASE)
WHEELS = re.compile(r"fa3-fwd(?: |-)\d|dew-flash-attn")


UNDATED = [page for page in PAGES if page.name != "CHANGELOG.md"]


def test_official_flash_attention_3_is_called_what_it_is_where_a_page_first_names_it():
    """It is two wheels of other people: the paragraph of its first mention, or the one below a title, says so."""
    named = 0
    for page in UNDATED:
        paragraphs = re.split(r"\n\s*\n", page.read_text())
        first = next((i for i, text in enumerate(paragraphs) if OFFICIAL.search(text)), None)
        if first is not None:
            named += 1
            told = paragraphs[first : first + 1 + paragraphs[first].startswith("#")]
            assert WHEELS.search(" ".join(told)), (relative(page), told[0][:200])
    assert named


REPORTS = ROOT / "reports"
CODE = REPORTS / "fa3_reports"
EVIDENCE = {".csv", ".json", ".jsonl", ".nc", ".npz", ".toml", ".xz"}


def test_pages_that_link_to_stale_evidence_say_so():
    """Nothing claims to be of today's code that is not: whoever links to a file whose key is another says stale."""
    silent = {relative(page): names for page in UNDATED if (names := unsaid_staleness(page))}
    assert not silent


def unpacked(path: Path) -> Path:
    """Return the name that a packed table has unpacked; of anything else its own."""
    plain = path.with_suffix("")
    return plain if path.suffix == PACKED and plain.suffix in EVIDENCE else path


def unsaid_staleness(page: Path) -> list[str]:
    """Stale files to which a page links that does not say so."""
    text = page.read_text()
    if "stale" in text.lower():
        return []
    links = {page.parent / link for link in re.findall(r"\]\(([^)\s#]+)", text) if "://" not in link}
    linked = [unpacked(path.resolve()) for path in links if path.suffix in EVIDENCE]
    files = [path for path in linked if REPORTS in path.parents and CODE not in path.parents]
    return [path.name for path in files if keys.why_stale(Source(path.parent), path.name)]


def test_links_lead_to_headings():
    missing = []
    for page in PAGES:
        for path, name in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", page.read_text()):
            target = page.parent / path if path else page
            if "://" not in path and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                missing += [f"{relative(page)}: {path}#{name}"] if name not in map(anchor, headings) else []
    assert not missing


def anchor(heading: str) -> str:
    """What a link to a heading names, as GitHub makes it."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip())
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


OTHERS = [path for room in ("docs/site", "tests") for path in sorted((ROOT / room).rglob("*.md"))]
OF_TODAY = [page for page in (*PAGES, *OTHERS) if page.name != "CHANGELOG.md"]  # which says what was renamed
PACKAGES = {
    "fa3verify": "",
    "fa3_kernels": "kernels",
    "fa3_simulator": "simulator",
    "fa3_reference": "reference",
    "fa3_reports": "reports",
}
MODULE = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+(?![\w/])")
PATH = re.compile(r"[\w.-]+/(?:[\w.-]+/)*(?:[\w-]+\.(?:pyi?|toml|csv|jsonl?|md|npz|svg|xz))?")
# what a reader's commands write, and files of other people's repositories
ELSEWHERE = ("out/", "OUT/", "mine/", "baselines/", "hopper/", "flash_attn/", "torch/")


def is_module_or_name(dotted: str) -> bool:
    """Whether a module of ours exists, or a name of its text that follows it; torch and Triton need not be there."""
    package, *rest = dotted.split(".")
    place = ROOT / PACKAGES[package] / package
    for part in rest:
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").is_file():
            place /= f"{part}.py"
        else:
            files = [place] if place.is_file() else place.glob("__init__.py*")
            nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
            return any(part in (getattr(x, "name", ""), getattr(x, "id", ""), getattr(x, "value", "")) for x in nodes)
    return True


def paths_in(text: str) -> list[str]:
    """Paths of files and folders of the project in the code of a page: of each word of every command."""
    words = [word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()]
    return [word for word in words if PATH.fullmatch(word) and not word.startswith(ELSEWHERE)]


def test_modules_that_a_page_names_exist():
    named = [(relative(page), name) for page in OF_TODAY for name in MODULE.findall(page.read_text())]
    assert len(named) > 50
    assert not [(page, name) for page, name in named if not is_module_or_name(name)]


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("fa3verify.kernel", True),
        ("fa3_kernels.api.flash_attn_func", True),
        ("fa3_kernels.gluon", True),
        ("fa3_simulator.microbench.suite", False),
        ("fa3_kernels.launched.launch_sha256", False),
        ("fa3_kernels.api.flash_attn_kvpacked_func", False),
    ],
)
def test_a_module_that_exists_is_told_from_one_that_does_not(name, exists):
    assert is_module_or_name(name) == exists


def test_paths_that_a_page_names_exist():
    missing = []
    for page in OF_TODAY:
        places = [*(ROOT / room for room in ROOMS), page.parent]
        for path in paths_in(page.read_text()):
            files = (path, f"{path}.xz")  # a table that is read where it is packed
            missing += [] if any((x / file).exists() for x in places for file in files) else [(relative(page), path)]
    assert not missing


def test_paths_are_found_in_commands_and_files_of_others_left_out():
    text = "See `docs/code.md`, `python -m pytest tests/gone.py` and `hopper/tile_size.h`, not a/b.py."
    assert paths_in(text) == ["docs/code.md", "tests/gone.py"]


INSTALLED = re.compile(
    r"(?:pip3?|uv|pipx|poetry)\s+(?:install|add|run|download|wheel)\b([^`\n#|;&]*)|\buvx\s+([^`\n#|;&]*)"
)
OURS = re.compile(r"fa3verify(\[[^\]]*\])?([=<>~!@].*)?", re.IGNORECASE)
TOLD = ("fa3verify", "kernels", "simulator", "reference", "docs", "tests", "reports", ".ci")
TEXTS = {".py", ".md", ".yml", ".sh", ".toml", ".j2", ".cff", ""}


def from_an_index(text: str) -> list[str]:
    """Installations of a text that ask an index for a package of our name, which is anybody's."""
    found = []
    for match in INSTALLED.finditer(text):
        words = re.split(r"[\s'\"()]+", match[1] or match[2] or "")
        found += [match[0] for word in words if OURS.fullmatch(word.rstrip(".,:)"))]
    return found


def capabilities() -> list[tuple[str, str, str]]:
    """Rows of the table of docs/code.md: what it can do, where the code lives, and what shows it."""
    text = (ROOT / "docs" / "code.md").read_text().split("## What it can do, and where")[1].split("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if line.startswith("| ") and "`" in line
    ]
    return [row for row in rows if len(row) == 3 and all(row)]


def test_every_verb_stands_in_the_table_of_capabilities_and_every_place_exists():
    rows = capabilities()
    named = " ".join(what for what, _, _ in rows)
    missing = [verb for verb in (*main.commands, *own_verbs.commands) if f"`{verb}`" not in named]
    assert not missing
    places = [place for _, code, shown in rows for place in re.findall(r"`([^`]+)`", f"{code} {shown}")]
    assert len(places) > 60
    assert not [place for place in places if not (ROOT / place).exists()]
    assert len(rows) >= len(main.commands)


def test_nothing_installs_fa3verify_from_an_index():
    """No index has it: whoever takes the name there would be run by those who follow our pages and hints."""
    places = [*ROOT.glob("*"), *(path for room in TOLD for path in (ROOT / room).rglob("*"))]
    texts = [path for path in places if path.suffix in TEXTS and path.is_file() and path != Path(__file__)]
    texts = [path for path in texts if path.name != "CHANGELOG.md" and "__pycache__" not in path.parts]
    assert len(texts) > 500
    found = {relative(path): lines for path in texts if (lines := from_an_index(path.read_text(errors="replace")))}
    assert not found


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("pip install fa3verify", True),
        ("- run: pip install . fa3verify", True),
        ("run `pip install 'fa3verify[torch]'`.", True),
        ("uv pip install fa3verify==0.2.0", True),
        ("uv add fa3verify", True),
        ("pip install ./fa3verify", False),
        ("pip install PATH/TO/fa3verify", False),
        ('pip install . "$FA3VERIFY"', False),
        ("pip install -e '.[test]'  # of fa3verify", False),
        ("pip install wheels/fa3verify-0.2.0-py3-none-any.whl", False),
    ],
)
def test_an_installation_from_an_index_is_told_from_one_of_a_path(text, is_found):
    assert bool(from_an_index(text)) == is_found


def test_the_page_of_limits_lists_every_parameter_that_is_refused():
    section = (ROOT / "docs" / "limits.md").read_text().split("### Beside FlashAttention-3's functions")[1]
    refused = set()
    for module in ("api.py", "cached.py", "scheduler.py"):
        text = (ROOT / "kernels" / "fa3_kernels" / module).read_text()
        for names in re.findall(r"^    ([\w, ]+) : .*\n        (?:.*\. )?Refused ", text, re.MULTILINE):
            refused |= set(names.split(", "))
    assert refused >= {"qv"}
    assert not [name for name in refused if f"`{name}`" not in section.split("\n## ")[0]]


HEAD_DIMS = ROOT / "reports" / "h200" / "speed" / "head_dims"


def ratios_of_head_dims() -> dict[tuple[str, ...], dict[str, float]]:
    """Time of the faster FlashAttention-3 over that of each of our kernels, by pass, dtype, head dims and mask."""
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in read_csv(HEAD_DIMS / "head_dims.csv"):
        place = tuple(row[name] for name in ("pass", "dtype", "head_dim", "head_dim_v", "causal"))
        if row["ms"]:
            found[place][row["kernel"]] = float(row["ms"])
    return {
        place: {
            name: min(ms for peer, ms in times.items() if peer.startswith("flash3")) / ms for name, ms in times.items()
        }
        for place, times in found.items()
    }


def test_ratios_of_head_dims_are_those_of_the_times():
    ratios = ratios_of_head_dims()
    text = (HEAD_DIMS / "README.md").read_text()
    head, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    kinds = {
        "forward bf16": ("fwd", "bf16", "gluon"),
        "forward e4m3, promoted": ("fwd", "e4m3", "gluon"),
        "forward e4m3, chained": ("fwd", "e4m3", "gluon.chained"),
    }
    shown = 0
    for what, *cells in lines:
        part, dtype, kernel = kinds[what]
        for dims, cell in zip(head[1:], cells, strict=True):
            head_dim, *wide = re.findall(r"\d+", dims)
            places = [(part, dtype, head_dim, *(wide or [head_dim]), causal) for causal in ("False", "True")]
            known = [f"{ratios[place][kernel]:.2f}" for place in places if place in ratios]
            shown += len(known)
            assert cell == (" / ".join(known) or "–"), (what, dims)
    assert shown == sum(len([name for name in found if name.startswith("gluon")]) for found in ratios.values())


UNLISTED = ROOT / "reports" / "h200" / "speed" / "unlisted"
OURS_UNLISTED = {  # row of its first table -> pass, dtypes, our kernel
    "forward bf16": ("forward", ("bf16",), "gluon"),
    "forward fp16": ("forward", ("fp16",), "gluon"),
    "forward e4m3, promoted": ("forward", ("e4m3",), "gluon"),
    "forward e4m3, chained": ("forward", ("e4m3",), "gluon.chained"),
    "gradients": ("backward", ("bf16", "fp16"), "gluon"),
    "gradients in a fixed order, over any order": ("backward", ("bf16", "fp16"), "gluon.deterministic"),
}


def unlisted_cells() -> list[tuple[dict[str, str], dict[str, float]]]:
    """Shapes that no list has, each with the milliseconds of its kernels."""
    measured = ("kernel", "ms", "ms_min", "ms_max", "sm_mhz", "cycles")
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = defaultdict(dict)
    for row in read_csv(UNLISTED / "unlisted.csv"):
        shape = tuple((name, value) for name, value in row.items() if name not in measured)
        found[shape][row["kernel"]] = float(row["ms"])
    return [(dict(shape), times) for shape, times in found.items()]


def unlisted_tables() -> list[list[list[str]]]:
    """Cells of the two tables of the page on shapes that no list has, without their heads."""
    tables: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", (UNLISTED / "README.md").read_text(), re.MULTILINE):
        tables.append([line.strip("| ").split(" | ") for line in block.splitlines()[2:]])
    return tables


def test_ratios_of_shapes_that_no_list_has_are_those_of_the_times():
    widths = ("64/64", "96/96", "128/128", "160/160", "192/192", "192/128", "256/256")
    rows, _ = unlisted_tables()
    assert [what for what, *_ in rows] == [*OURS_UNLISTED]
    for what, *said in rows:
        part, dtypes, kernel = OURS_UNLISTED[what]
        ratios: dict[str, list[float]] = defaultdict(list)
        for shape, ms in unlisted_cells():
            peers = [x for name, x in ms.items() if name.startswith("flash3")]
            is_asked = shape["pass"] == part and shape["dtype"] in dtypes and not shape["window"]
            if is_asked and shape["seqlen_q"] != "1" and peers and kernel in ms:
                ratios[f"{shape['head_dim']}/{shape['head_dim_v']}"].append(min(peers) / ms[kernel])
        every = [ratio for of in ratios.values() for ratio in of]
        means = [f"{geometric_mean(ratios[width]):.2f}" if width in ratios else "–" for width in widths]
        assert said == [*means, f"{geometric_mean(every):.2f}", str(len(every)), f"{min(every):.2f}"], what


def test_ratios_over_pages_that_no_list_has_are_those_of_the_times():
    _, rows = unlisted_tables()
    for what, *said in rows:
        of: dict[str, list[float]] = {"bf16": [], "e4m3": []}
        groups = [int(number) for number in re.findall(r"\d+", what.partition("groups")[2])]
        for shape, ms in unlisted_cells():
            group = int(shape["nheads"]) // int(shape["nheads_kv"])
            is_step = shape["seqlen_q"] == "1"
            if shape["pass"] == "pages" and group in groups and is_step == what.startswith("1 query"):
                of[shape["dtype"]].append(ms["vllm"] / ms["gluon"])
        found = [
            cell
            for x in of.values()
            for cell in (f"{geometric_mean(x):.2f}", str(len(x)), f"{min(x):.2f}", f"{max(x):.2f}")
        ]
        assert said == found, what


def test_pages_that_state_the_speed_of_unlisted_shapes_state_what_the_table_has():
    first, _ = unlisted_tables()
    rows = {what: cells for what, *cells in first}
    e4m3 = rows["forward e4m3, promoted"]
    gradients = rows["gradients"]
    readme = (ROOT / "README.md").read_text()
    assert f"FP8 {e4m3[0]}, {e4m3[2]} and {e4m3[6]} at 64, 128 and 256" in readme
    assert f"{gradients[4]} at 192" in readme


def test_pages_that_state_the_speed_over_pages_state_what_was_timed():
    assert (ROOT / "reports" / "h200" / "serving" / "decoding.md").read_text() == decoding.page()
    found = defaultdict(list)
    for row in decoding.rows():
        for key in ((row.kind, row.cell.dtype), (row.kind, row.cell.dtype, row.page)):
            found[key] += [row] * row.is_packed
    means = {key: decoding.mean(some) for key, some in found.items()}
    decode = [row.ratio for row in found["decode", "bf16"]]
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = f"decoding {means['decode', 'bf16']:.2f} in BF16 ({min(decode):.2f} to {max(decode):.2f})"
    said += f" and {means['decode', 'e4m3']:.2f} in FP8"
    chunks = f"chunks of prompts {means['chunk', 'bf16']:.2f} and {means['chunk', 'e4m3']:.2f}"
    assert f"{said}, {chunks}" in readme
    kernels = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    slow = {f"{means['chunk', 'bf16', size]:.2f}" for size in (1, 16)}
    for said in (
        f"at {means['decode', 'bf16']:.2f} times the speed of vLLM's build in bf16",
        f"and at {means['decode', 'e4m3']:.2f} times in e4m3",
        "over pages of one key at {:.2f} and {:.2f} times".format(*(means["decode", x, 1] for x in ("bf16", "e4m3"))),
        "run at {:.2f} and {:.2f} times over pages of 64".format(*(means["chunk", x, 64] for x in ("bf16", "e4m3"))),
        "in bf16 at {} over pages of 16 and of one".format(*slow),
    ):
        assert said in kernels


def ratios_by_head_dim(folder: str) -> dict[tuple[str, str], float]:
    """Geometric mean of our speed over the faster FlashAttention-3, by dtype and head dims, of a bench on an H200."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in results.read(ROOT / "reports" / "h200" / "speed" / folder / "bench.jsonl").cells.values():
        peers = [record.tflops(name) for name in ("flash3", "flash3.dew")]
        if record.cell.grid == folder and not all(map(math.isnan, peers)):
            width = f"{record.cell.head_dim}" + (f" with V of {v}" if (v := record.cell.head_dim_v) else "")
            found[record.cell.dtype, width].append(record.tflops("gluon") / max(x for x in peers if x > 0))
    return {key: geometric_mean(values) for key, values in found.items()}


def test_the_page_of_limits_says_the_speed_of_every_head_dim_that_was_measured():
    text = (ROOT / "docs" / "limits.md").read_text()
    (line,) = re.findall(r"^- Head dims that are no power of two .*$", text, re.MULTILINE)
    forward = ratios_by_head_dim("widths")
    gradients = ratios_by_head_dim("backward_widths")
    parts = dict(zip(("bf16", "e4m3", "fp16"), line.split("; "), strict=True))
    for dtype, part in parts.items():
        ratios = gradients if dtype == "fp16" else forward
        said = {width: ratio for ratio, width in re.findall(r"(\d\.\d\d) at (\d+(?: with V of \d+)?)", part)}
        assert said == {width: f"{ratio:.2f}" for (of, width), ratio in ratios.items() if of == dtype}
