"""What an adapter may be called."""

from __future__ import annotations

import re
from collections.abc import Collection

from app.adapters.base import AdapterRefused

MAX_LENGTH = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str, taken: Collection[str]) -> None:
    """Raise AdapterRefused for a name that no adapter may have, or that is among those `taken` by models.

    The name is part of keys, of `name@version`, and of URLs; of paths it never is.
    """
    if not name:
        raise AdapterRefused("the adapter's name is empty")
    if len(name) > MAX_LENGTH:
        raise AdapterRefused(f"the adapter's name has {len(name)} characters; {MAX_LENGTH} are allowed")
    if name in taken:
        raise AdapterRefused(f"{name!r} is the name of a served model; give the adapter another one")
    if not _NAME.fullmatch(name):
        raise AdapterRefused(
            f"{name!r} cannot be an adapter's name: it has letters, digits, '.', '_' and '-' alone, and begins with a "
            "letter or a digit"
        )
