"""Virtual environments of the clients' suites: clients pin each other's versions, so each has one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
SUITES = ROOT / "tests" / "clients"
VENVS = ROOT / ".trivet" / "client-venvs"
CLIENTS = sorted(lock.parent.name for lock in SUITES.glob("*/requirements.lock"))
LIMIT_S = 240
#: pip's variables, and uv's for the same.
NAMES = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
}


def made(client: str) -> Path:
    """The client's environment, made or brought up to date with its lock: a second run changes nothing and is quick.

    uv does that in seconds. It does not read pip's configuration files, so where it fails pip is asked.
    """
    folder, lock = VENVS / client, SUITES / client / "requirements.lock"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    uv = find_uv_bin()
    try:
        _run(uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
        _run(uv, "pip", "sync", "--quiet", "--python", python, lock)
    except subprocess.CalledProcessError as error:
        print(f"uv cannot make {folder}, pip has to: {error.stderr.decode()[-2000:]}")
        _run(sys.executable, "-m", "venv", folder)
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--no-input"]
        _run(*pip, "install", "--quiet", "--no-deps", "--requirement", lock)
    return folder


def _run(*command: str | Path) -> None:
    environment = dict(os.environ)
    for pip, uv in NAMES.items():
        if pip in os.environ:
            separator = "," if uv == "UV_FIND_LINKS" else " "
            environment.setdefault(uv, separator.join(os.environ[pip].split()))
    subprocess.run(command, cwd=SUITES, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
