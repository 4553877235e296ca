"""The keys of the API: read by the API itself, and by `trivet` where it is a client."""

from __future__ import annotations

import re
from pathlib import Path

from app.settings import SettingsError, variable
from app.settings_sections import KEY, ApiSettings

COMMENT = re.compile(r"(^|\s)#.*")


def read(api: ApiSettings) -> tuple[str, ...]:
    """All keys, each once, those of the setting first. Raises SettingsError, which never repeats a key."""
    keys = [one.get_secret_value() for one in api.api_keys]
    if api.api_keys_file is not None:
        keys += in_file(Path(api.api_keys_file))
    return tuple(dict.fromkeys(keys))


def headers(key: str | None) -> dict[str, str]:
    """What a client sends."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def in_file(path: Path) -> list[str]:
    """The keys of a file, at least one. Raises SettingsError, which never repeats a key."""
    where = f"api.api_keys_file ({variable('api.api_keys_file')}): {path}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where}: {getattr(error, 'strerror', None) or 'is no text'}") from None
    keys: list[str] = []
    for number, line in enumerate(lines, 1):
        key = COMMENT.sub("", line).strip()
        if key and not KEY.fullmatch(key):
            raise SettingsError(f"{where}, line {number}: a key is printable ASCII without spaces, commas and $")
        keys += [key] if key else []
    if not keys:
        # Open to everybody is what nobody wants who names a file.
        raise SettingsError(f"{where}: has no key in it")
    return keys
