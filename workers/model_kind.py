"""Adapter to vLLM: what this worker's model does, known before anything is loaded for it."""

from __future__ import annotations

from app import vllm_model
from app.roles import Does, Role
from app.settings import Settings
from workers import engine_args
from workers.preflight import MisconfiguredWorker


def of(settings: Settings) -> Does:
    """By vLLM's own flags and the model's configuration. Raises SettingsError for flags that are none, and
    MisconfiguredWorker for one that such a model cannot have."""
    engine_args.prepare_environment(settings)
    flags = engine_args.parsed(settings)
    does = vllm_model.does(flags.create_model_config())
    if does is Does.EMBED and flags.data_parallel_size > 1:
        raise MisconfiguredWorker(
            "the model makes embeddings, and there vLLM lets no request choose among data-parallel ranks: start more "
            "workers, without --data-parallel-size"
        )
    return does


def check(settings: Settings, does: Does) -> None:
    """Raise MisconfiguredWorker for what a model that makes embeddings cannot have: there is nothing to hand on."""
    if does is Does.GENERATE:
        return
    if settings.enable_multimodal:
        raise MisconfiguredWorker(
            "the model makes embeddings, here of text alone: start API and workers without --enable-multimodal"
        )
    if not {Role.PREFILL, Role.DECODE} <= settings.roles:
        raise MisconfiguredWorker(
            "the model makes embeddings, each in one go: give every worker the roles prefill and decode, as topology "
            f"agg does, and not {', '.join(sorted(settings.roles))} alone"
        )
