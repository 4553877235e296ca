"""`trivet config`."""

from __future__ import annotations

import json
import os
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from app.cli import output

if TYPE_CHECKING:
    from app.settings import Settings


class Row(NamedTuple):
    """One setting. `source` is flag, `environment VARIABLE`, the file's path, or default."""

    path: str
    value: Any
    source: str
    meaning: str


def config(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: path -> value, source and meaning.")] = False,
) -> None:
    """Every setting: its value and where that came from. Flags of `trivet up` may follow, to see what they would do."""
    from app.cli import engine_flags, up

    asked = _as_up(context)
    given = up.flags(asked.params) | ({"engine": engine_flags.split(asked.args)} if asked.args else {})
    found = rows(up.load(asked), given)
    if as_json:
        print(json.dumps({row.path: row._asdict() for row in found}, indent=2))
        return
    _print(found)


def rows(settings: Settings, flags: dict[str, Any]) -> list[Row]:
    """All settings with their sources, given the flags' part of them. Passwords in URLs and keys are left out."""
    from app import settings as module
    from app.redis import redacted

    values = module.leaves(settings.model_dump(mode="json"))
    flagged = module.leaves(flags)
    path_of_file = module.config_file()
    filed = module.leaves(tomllib.loads(path_of_file.read_text())) if path_of_file.is_file() else {}
    set_here = {name.upper() for name, value in os.environ.items() if value}

    def shown(path: str, value: Any) -> Any:
        if path in module.SECRETS:
            return "***" if value else value
        return redacted(value) if path.endswith("_url") and value else value

    def source(path: str) -> str:
        if path in flagged:
            return "flag"
        if module.variable(path) in set_here:
            return f"environment {module.variable(path)}"
        return str(path_of_file) if path in filed else "default"

    return [
        Row(path, shown(path, _plain(values[path])), source(path), meaning) for path, meaning in module.known().items()
    ]


def _as_up(context: typer.Context) -> Any:
    """Read the rest of the command line as `trivet up` would."""
    from app.cli.main import app

    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command.commands["up"].make_context("up", list(context.args))


def _plain(value: Any) -> Any:
    return ",".join(sorted(map(str, value))) if isinstance(value, list) else value


def _print(found: list[Row]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("setting", "value", "source"):
        table.add_column(heading, overflow="fold")
    for row in found:
        table.add_row(row.path, "" if row.value is None else str(row.value), row.source)
    output.console().print(table)
