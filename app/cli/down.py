"""`trivet down`."""

from __future__ import annotations

from app.cli import output
from app.cli.up import Name


def down(name: Name = "default") -> None:
    """Stop what `trivet up` started, or what is left of it. Requests in flight get ten seconds."""
    import asyncio

    from app.launch import down as stopping
    from app.launch import view
    from app.launch.state import StateDirectory

    directory = StateDirectory(name)
    shown = view.View(output.console(), live=False)
    if (before := directory.running()) is not None:
        shown.seen(before)
    print(asyncio.run(stopping.down(directory, shown.update)))
