"""Adapter to vLLM: engine flags, read by vLLM's own parser, so that names, values and errors are vLLM's."""

from __future__ import annotations

import shlex
from typing import Any, NoReturn

from app.settings import SettingsError


def split(flags: str) -> list[str]:
    """Flags in one string, as a shell splits them."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise SettingsError(f"engine.args (TRIVET_ENGINE__ARGS): {error}, in {flags!r}") from None


def parse(model: str, given: list[str]) -> Any:
    """vLLM's own parser over vLLM's own flags."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not model:
        raise SettingsError("model (TRIVET_MODEL): name a model, as a local path or a hub name")
    parser = FlexibleArgumentParser(exit_on_error=False)
    AsyncEngineArgs.add_cli_args(parser)
    # In place of 300 lines of usage and an exit.
    parser.error = _refuse
    try:
        return AsyncEngineArgs.from_cli_args(parser.parse_args([*given, "--model", model]))
    except (SystemExit, Exception) as error:
        raise SettingsError(f"engine.args (TRIVET_ENGINE__ARGS): vLLM does not take {given!r}: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
