"""Adapter to vLLM: what a model does, as its configuration tells. API and workers have to agree."""

from __future__ import annotations

from typing import Any

from app.roles import Does


def does(model_config: Any) -> Does:
    """Of vLLM's ModelConfig. A model that classifies or ranks pools, too: only its engine tells, when it is loaded."""
    return Does.EMBED if model_config.runner_type == "pooling" else Does.GENERATE
