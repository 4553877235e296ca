"""Whether the program that a documented command line names would take it: asked of the program's own parser."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]


def check(words: list[str]) -> Any:
    """The context that click made of the line, if click reads it. Raises whatever says that it would be refused."""
    program, *arguments = words
    return _CHECKS[program](arguments)


def is_known(program: str) -> bool:
    return program in _CHECKS


def _celery(arguments: list[str]) -> click.Context | None:
    from celery.app.utils import find_app

    from app.celery import app

    assert arguments[:2] == ["-A", "app.celery"], arguments
    assert find_app(arguments[1]) is app
    command, *rest = arguments[2:]
    return {"worker": _worker, "flower": _flower}[command](app, rest)


def _worker(app: Any, arguments: list[str]) -> click.Context:
    from celery.bin.base import CLIContext
    from celery.bin.worker import worker

    command = copy.copy(worker)
    command.params = [*worker.params, *app.user_options["worker"]]
    context = command.make_context("worker", arguments, obj=CLIContext(app, no_color=True, workdir=None))
    # Celery ignores words that it does not know.
    assert context.args == [], context.args
    return context


def _flower(_: Any, arguments: list[str]) -> None:
    from flower.command import is_flower_option
    from tornado.options import options

    for argument in arguments:
        # Flower drops options that it does not know, without a word.
        assert argument.startswith("--") and is_flower_option(argument), argument
        name, _, value = argument.removeprefix("--").partition("=")
        options._options[name].type(value)


def _uvicorn(arguments: list[str]) -> click.Context:
    from uvicorn.importer import import_from_string
    from uvicorn.main import main

    context = main.make_context("uvicorn", arguments)
    assert callable(import_from_string(context.params["app"]))
    return context


def _python(arguments: list[str]) -> None:
    assert arguments[0] == "-m", arguments
    assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]


def _trivet(arguments: list[str]) -> Any:
    import typer

    from app.cli import engine_flags
    from app.cli.main import app

    group: Any = typer.main.get_command(app)
    command, rest = group.commands[arguments[0]], arguments[1:]
    if hasattr(command, "commands"):  # a group of its own: typer's, which is no click.Group
        command, rest = command.commands[rest[0]], rest[1:]
    context = command.make_context(command.name, rest)
    # What `trivet` does not know itself is vLLM's, if it looks like a flag.
    engine_flags.split(context.args)
    return context


def _make(arguments: list[str]) -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    for word in arguments:
        assert "=" in word or word in targets, word


_CHECKS: dict[str, Any] = {
    "celery": _celery,
    "make": _make,
    "python": _python,
    "trivet": _trivet,
    "uvicorn": _uvicorn,
}
