"""Verb report: pages again, from their data; two sets of data beside each other; and a folder of runs as a history."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from fa3_reference.rules import require
from fa3verify.cli.exits import EPILOG, Verb

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("data", type=_FILE, nargs=-1)
@click.option("--out", type=_FOLDER, default=Path("out"), show_default=True)
@click.option(
    "--against", type=_FILE, metavar="OLD", help="Say where DATA is better or worse than an older run.nc or atlas.json."
)
@click.option(
    "--pair",
    "given",
    multiple=True,
    metavar="OLD=NEW",
    help="With --against: compare these two kernels. May be repeated.",
)
@click.option(
    "--history", type=_FOLDER, metavar="DIR", help="Instead draw the number that ranks over every run.nc below DIR."
)
def report(
    data: tuple[Path, ...], out: Path, against: Path | None, given: tuple[str, ...], history: Path | None
) -> None:
    """Build pages again from DATA: a run.nc that verify wrote, or atlases that atlas wrote, as one page.

    Beside atlases a page takes the table.json of compare, the curves.csv of hunt, and reports/findings/known.json.
    """
    click.echo(_of_folder(history, data, out, against, given) if history else _of_data(data, out, against, given))


def _of_folder(history: Path, data: tuple[Path, ...], out: Path, against: Path | None, given: tuple[str, ...]) -> str:
    """Make the page of --history and return its path; ValueError for DATA, --against or --pair beside it."""
    from fa3verify.commands import verify
    from fa3verify.report import history as over_runs

    require(
        not (data or against or given),
        "--history takes runs from its folder, and neither DATA nor --against nor --pair",
    )
    verify.prepare_output(out)
    return str(over_runs.write_pages(out, history))


def _of_data(data: tuple[Path, ...], out: Path, against: Path | None, given: tuple[str, ...]) -> str:
    """Make the page of DATA, or of DATA beside ``against``, and return what is printed.

    ``given`` are the texts OLD=NEW of --pair. ValueError for data and options that do not go together.
    """
    from fa3verify.commands import verify
    from fa3verify.report import against as beside, atlas_page, build

    require(data, "report needs DATA: a run.nc or atlases; or --history DIR")
    runs = [path for path in data if path.suffix == ".nc"]
    require(not runs or len(data) <= 1, "a page is of one run.nc, or of atlases")
    require(not given or against is not None, "--pair is for --against")
    verify.prepare_output(out)
    if against is not None:
        chosen = [(old, new) for old, _, new in (pair.partition("=") for pair in given)]
        require(all(old and new for old, new in chosen), "--pair is OLD=NEW, the names of two kernels")
        page, sentences = beside.write_pages(out, data, against, chosen)
        return "\n".join((*sentences, str(page)))
    return str(build.rebuild(runs[0], out) if runs else atlas_page.write_pages(out, data))
