"""Adapter to PyTorch: the kernel's leave to use Intel's AMX tiles, for every process of vLLM's.

Linux kills a process that uses AMX without having asked for it. PyTorch asks when one of its own AMX kernels runs
first; vLLM's CPU attention has AMX kernels too, and in a decode engine, which computes almost nothing of a prompt,
they come first. A general plugin of vLLM's, since those run in its engine's process (see pyproject.toml).
"""

from __future__ import annotations


def install() -> None:
    """Ask, where the processor has AMX; harmless when asked before."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
