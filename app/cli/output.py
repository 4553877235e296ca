"""Where the commands print tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a table that goes into a pipe or a file: nobody wants it folded.
PIPED_WIDTH = 200


def console() -> Console:
    """Text as it is, without markup; as wide as the terminal if there is one."""
    from rich.console import Console

    made = Console(highlight=False, markup=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, width=PIPED_WIDTH)
