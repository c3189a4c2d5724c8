"""Verb report: pages again, from their data, and what moved between two sets of data."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from fa3verify.cli.exits import EPILOG, one_line_errors

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(epilog=EPILOG)
@click.argument("data", type=_FILE, nargs=-1, required=True)
@click.option("--out", type=_FOLDER, default=Path("out"), show_default=True)
@click.option("--against", type=_FILE, metavar="OLD", help="Show what moved against an older run.nc or atlas.json.")
def report(data: tuple[Path, ...], out: Path, against: Path | None) -> None:
    """Build pages again from DATA: a run.nc that verify wrote, or atlases that atlas wrote, as one page.

    Beside atlases a page takes the table.json of compare, the curves.csv of hunt, and reports/findings/known.json.
    """
    with one_line_errors():
        click.echo(_of_data(data, out, against))


def _of_data(data: tuple[Path, ...], out: Path, against: Path | None) -> str:
    from fa3verify.commands import verify
    from fa3verify.report import atlas_page, build, moved

    runs = [path for path in data if path.suffix == ".nc"]
    if runs and len(data) > 1:
        raise ValueError("a page is of one run.nc, or of atlases")
    verify.prepare_output(out)
    if against is not None:
        page, count = moved.write_pages(out, data, against)
        return f"{count} moved: {page}"
    return str(build.rebuild(runs[0], out) if runs else atlas_page.write_pages(out, data))
