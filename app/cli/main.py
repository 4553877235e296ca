"""The command `trivet`."""

from __future__ import annotations

import sys
from typing import Any

import typer

from app.cli import chat, config, down, lora, route, status, up, version

app = typer.Typer(
    help="Trivet serves multimodal models: encode, prefill and decode on workers of their own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

#: What `up` does not know itself is vLLM's.
PASS_THROUGH: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(context_settings=PASS_THROUGH)(up.up)
app.command()(down.down)
app.command()(status.status)
app.command()(chat.chat)
app.command()(route.route)
app.add_typer(lora.app, name="lora")
app.command(context_settings=PASS_THROUGH)(config.config)
app.command()(version.version)


def main() -> None:
    """Run; errors that a user can mend are one line on stderr and exit code 1."""
    try:
        app()
    except Exception as error:
        if not _expected(error):
            raise
        sys.exit(f"trivet: {error}")


def _expected(error: Exception) -> bool:
    from redis.exceptions import RedisError

    from app.launch.errors import LaunchError
    from app.redis import RedisUnavailable, UnsafeBroker
    from app.settings import SettingsError

    return isinstance(error, (LaunchError, SettingsError, RedisUnavailable, UnsafeBroker, RedisError))


if __name__ == "__main__":
    main()
