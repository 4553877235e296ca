"""Virtual environments beside the project's own: clients pin each other's versions, so that each has one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
SUITES = ROOT / "tests" / "clients"
VENVS = ROOT / ".trivet" / "client-venvs"
CLIENTS = sorted(lock.parent.name for lock in SUITES.glob("*/requirements.lock"))
LIMIT_S = 240
#: pip's options, and uv's variables for the same, with what uv puts between several values.
OPTIONS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
#: pip takes them in this order, the last one counts.
SECTIONS = ("global", "install", ":env:")


def made(lock: Path) -> Path:
    """The environment of this lock, named after its folder, made or brought up to date: a second run changes nothing
    and is quick.

    By uv, which does that in seconds; where it cannot, by pip.
    """
    folder = VENVS / lock.parent.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    uv = find_uv_bin()
    try:
        _run(uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
        _run(uv, "pip", "sync", "--quiet", "--python", python, lock)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"uv cannot make {folder}, pip has to: {error}\n{(error.stderr or b'').decode()[-2000:]}")
        _run(sys.executable, "-m", "venv", folder)
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--no-input"]
        _run(*pip, "install", "--quiet", "--no-deps", "--requirement", lock)
    return folder


def _run(*command: str | Path) -> None:
    environment = pip_settings() | os.environ
    subprocess.run(command, cwd=SUITES, env=environment, check=True, capture_output=True, timeout=LIMIT_S)


@cache
def pip_settings() -> dict[str, str]:
    """Those of pip's files and variables as variables of uv, which reads neither."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    return translated(listed)


def translated(listed: str) -> dict[str, str]:
    """What `pip config list` prints, as variables of uv."""
    options: dict[str, str] = {}
    settings = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
    for section in SECTIONS:
        for name, value in settings.items():
            if name.startswith(f"{section}."):
                options[name.removeprefix(f"{section}.")] = ast.literal_eval(value)
    found = {uv: separator.join(options[name].split()) for name, (uv, separator) in OPTIONS.items() if name in options}
    # pip looks through all of its indexes; uv would stop at the first that knows a package, whatever the version.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **found}
