"""Adapter to vLLM: from Trivet's settings and a worker's roles to the arguments and environment of an engine."""

from __future__ import annotations

import logging
import math
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from app import ports, torchvision_ops, vllm_args, vllm_reasoning
from app.roles import KVRole, Role, kv_role
from app.settings import Settings, SettingsError
from app.settings_media import MediaSettings
from app.tensors import nixl_progress
from workers import cpu_lora
from workers.kv_events import sources

log = logging.getLogger(__name__)


def prepare_environment(settings: Settings) -> None:
    """Set what vLLM and UCX read from the environment. Must run before vLLM is imported; what the user set is kept."""
    worker = settings.worker
    if worker.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = worker.gpu
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = worker.side_channel_host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = _side_channel_port(worker.side_channel_host)
    if kv_role(settings.roles) is not KVRole.NONE:
        os.environ[nixl_progress.VARIABLE] = str(settings.engine.nixl_progress_delay_us)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The program's own logging stays in force; vLLM's would replace it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", settings.log_level)
    _media_limits(settings.media)
    torchvision_ops.define()


@cache
def _side_channel_port(host: str) -> str:
    """This process's, however often its environment is prepared."""
    return str(ports.reserve(host))


def _media_limits(media: MediaSettings) -> None:
    """What the API admits, vLLM's loaders have to read: without this they have limits of their own."""
    limits = {
        "VLLM_MAX_IMAGE_PIXELS": media.max_image_pixels,
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": math.ceil(media.max_item_mb),
        "VLLM_MAX_AUDIO_DECODE_DURATION_S": math.ceil(media.max_audio_seconds),
        "VLLM_MAX_AUDIO_DECODE_BYTES": math.ceil(media.max_audio_decoded_mb * 1e6),
    }
    for name, most in limits.items():
        os.environ.setdefault(name, str(most))


def prepare_cpu(settings: Settings) -> None:
    """Share a host's cores among its engines. vLLM's own binding gives every engine all of them.

    One is left to the API, the workers' own loops and Redis: where a thread of an engine's step has no core, the others
    spin until it gets one, and with two threads on two busy cores a step took ten times as long.
    """
    cores = len(os.sched_getaffinity(0)) - 1
    threads = max(1, cores // settings.engine.per_host)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # One process less for each engine, and so half the start-up; thread binding, its one loss, is off anyway.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if settings.worker.side_channel_host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("UCX_TLS", "tcp,shm,self")
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def flags(settings: Settings) -> list[str]:
    """vLLM's flags for a worker of these roles: common ones first, so that those of a role win."""
    engine, roles = settings.engine, settings.roles
    parts = [engine.args]
    for role, text in (
        (Role.ENCODE, engine.encode_args),
        (Role.PREFILL, engine.prefill_args),
        (Role.DECODE, engine.decode_args),
    ):
        if role in roles:
            parts.append(text)
    return [flag for part in parts for flag in vllm_args.split(part)]


def parsed(settings: Settings) -> Any:
    """The flags alone, as vLLM's AsyncEngineArgs. Raises SettingsError when one is not vLLM's."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        prepare_cpu(settings)
    return vllm_args.parse(settings.model, flags(settings))


def build(settings: Settings, embeddings: Path | None, sockets: Path | None = None) -> Any:
    """vLLM's AsyncEngineArgs. `embeddings` is the folder of the worker's embedding store, if it has one, and `sockets`
    the one that KV events are published in, if they are.

    Raises SettingsError when a flag is not one of vLLM's.
    """
    from vllm.platforms import current_platform

    args = parsed(settings)
    _refuse_lora_flags(args)
    if settings.roles == {Role.ENCODE}:
        args.enable_lora = False  # no language model is loaded here
    if Role.DECODE in settings.roles:
        # A grammar must not begin before the reasoning has ended, and only the parser knows when.
        args.reasoning_parser = vllm_reasoning.of(settings.api.reasoning_parser, args)
    if current_platform.is_cpu():
        _cpu_defaults(args, settings)
    _transfer(args, settings)
    _embeddings(args, settings, embeddings)
    if sockets is not None and args.kv_events_config is None and args.enable_prefix_caching is not False:
        args.kv_events_config = sources.config(sockets)
    return args


def _refuse_lora_flags(args: Any) -> None:
    if args.enable_tower_connector_lora:
        raise SettingsError(
            "engine.args: --enable-tower-connector-lora is not supported: embeddings are shared by the model and all "
            "of its adapters, so that adapters can only change the language model"
        )
    if args.lora_target_modules:
        raise SettingsError(
            "engine.args: --lora-target-modules is not supported: of an adapter with other modules vLLM would run a "
            "part, or nothing, under its name"
        )
    if args.enable_lora and not cpu_lora.is_sound():
        raise SettingsError(
            "engine.args: --enable-lora needs vLLM's plugin trivet_cpu_lora here, or requests for the model would be "
            "answered with an adapter: install Trivet again, and if VLLM_PLUGINS is set, name the plugin there"
        )


def _cpu_defaults(args: Any, settings: Settings) -> None:
    if not args.enforce_eager and shutil.which(os.environ.get("CXX", "g++")) is None:
        log.warning("no C++ compiler (g++) to compile the model with: the engine runs eagerly, and slower")
        args.enforce_eager = True
    if args.distributed_executor_backend is None:
        args.distributed_executor_backend = "uni"
    if args.kv_cache_memory_bytes is None and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        # vLLM takes 92 % of the memory for each engine, which leaves none for the second.
        args.kv_cache_memory_bytes = int(_memory_bytes() * 0.4 / settings.engine.per_host)


def _memory_bytes() -> int:
    return int(psutil.virtual_memory().available)


def _transfer(args: Any, settings: Settings) -> None:
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    role = kv_role(settings.roles)
    if role is KVRole.NONE or args.kv_transfer_config is not None:
        return
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role=role.value,
        kv_buffer_device=current_platform.device_type,
        # Recomputing on a worker that has no pixels would kill its engine.
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"kv_lease_duration": settings.engine.kv_lease_s},
    )


def _embeddings(args: Any, settings: Settings, folder: Path | None) -> None:
    """Embeddings come and go through the store; items come rendered, with or without pixels."""
    from vllm.config import ECTransferConfig, MultiModalConfig

    # vLLM's own cache keeps an item by its name as it first came, and it may first have come without pixels.
    if args.mm_processor_cache_gb not in (0, MultiModalConfig.mm_processor_cache_gb):
        log.warning("--mm-processor-cache-gb has no effect: item records and the embedding cache take its place")
    args.mm_processor_cache_gb = 0
    if folder is None or args.ec_transfer_config is not None:
        return
    args.ec_transfer_config = ECTransferConfig(
        ec_connector="TrivetECConnector",
        ec_connector_module_path="workers.ec_connector",
        ec_role="ec_producer" if settings.roles == {Role.ENCODE} else "ec_both",
        ec_connector_extra_config={"directory": str(folder)},
    )
