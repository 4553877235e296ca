"""Adapter to vLLM: its encoder-cache connector, on embeddings in shared memory.

It copies local bytes in and out of the engine and does nothing else: what comes from other hosts was fetched by the
worker's process before. In a Trivet worker `{"directory": ...}` names the worker's embedding store. Without Trivet,

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "TrivetECConnector", "ec_role": "ec_both",
        "ec_connector_module_path": "workers.ec_connector", "ec_connector_extra_config": {"capacity_gb": 4}}'

gives the engine an embedding cache of its own in shared memory (a folder of `directory`, by default /dev/shm): an
image that vLLM's encoder cache has dropped is loaded and not encoded again. A capacity of 0 keeps nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from app.settings import SettingsError
from app.tensors import segment
from app.tensors.folder import check_room, make_folder
from workers.embeddings import tensor_files
from workers.embeddings.ec_stats import EcPrometheus, EcStats
from workers.embeddings.scheduler_side import SchedulerSide, Step
from workers.embeddings.shelves import NoShelf, OwnShelf, Shelf, WorkerShelf
from workers.embeddings.worker_side import WorkerSide

log = logging.getLogger(__name__)

ROOT = "/dev/shm"


class TrivetECConnector(ECConnectorBase):
    """vLLM makes one in its scheduler and one in each worker. Raises ValueError for an `extra_config` it cannot use."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        _check(extra, vllm_config)
        if role is ECConnectorRole.WORKER:
            self._worker = WorkerSide(writes=vllm_config.parallel_config.rank == 0)
        else:
            self._scheduler = SchedulerSide(
                _shelf(extra, vllm_config),
                tensor_files.check,
                self._total_bytes,
                producer=self.is_producer,
                consumer=self.is_consumer,
            )

    # Worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        step = self._connector_metadata
        if isinstance(step, Step) and step.loads:
            from vllm.utils.gpu_sync_debug import gpu_sync_allowed

            device, pin = _device()
            with gpu_sync_allowed():
                self._worker.load(encoder_cache, step, device, pin=pin)

    def start_save_caches(self, **kwargs: Any) -> None:
        step = self._connector_metadata
        if isinstance(step, Step) and step.cached:
            from vllm.utils.gpu_sync_debug import gpu_sync_allowed

            with gpu_sync_allowed():
                self._worker.save_cached(kwargs["encoder_cache"], step)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        step = self._connector_metadata
        if isinstance(step, Step) and step.saves:
            from vllm.utils.gpu_sync_debug import gpu_sync_allowed

            with gpu_sync_allowed():
                self._worker.save(encoder_cache, step, mm_hash)

    # Scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._scheduler.admit(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Of the request that `ensure_cache_available` was asked about last: vLLM asks it before it schedules one."""
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._scheduler.build(scheduler_output)

    def take_unavailable_requests(self) -> set[str]:
        """vLLM calls this once for every step that has run, in their order, and for no other reason."""
        return self._scheduler.step_done()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request.request_id)
        return False, None

    def get_ec_connector_stats(self) -> EcStats | None:
        return self._scheduler.take_stats() if self.role is ECConnectorRole.SCHEDULER else None

    def shutdown(self) -> None:
        if self.role is ECConnectorRole.SCHEDULER:
            self._scheduler.close()

    # Statistics, in the process that talks to the engine

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EcStats:
        return EcStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EcPrometheus:
        return EcPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _total_bytes(self, modality: str, rows: int) -> int | None:
        """vLLM measures the widths of a producer's encoders at its start."""
        width = self._vllm_config.ec_transfer_config.mm_encoder_output_widths.get(modality)
        if width is None:
            return None
        return int(segment.PAGE + rows * width * self._vllm_config.model_config.dtype.itemsize)


def _check(extra: dict[str, Any], vllm_config: Any) -> None:
    unknown = sorted(extra.keys() - {"directory", "capacity_gb"})
    if unknown or not extra:
        raise ValueError(
            f"TrivetECConnector's ec_connector_extra_config takes capacity_gb, directory or both; given: "
            f"{', '.join(unknown) or 'nothing'}"
        )
    capacity = extra.get("capacity_gb", 0)
    if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not 0 <= capacity < float("inf"):
        raise ValueError(f"TrivetECConnector: capacity_gb must be a number from 0; given: {capacity!r}")
    if not Path(extra.get("directory", ROOT)).is_absolute():
        raise ValueError(f"TrivetECConnector: directory must be an absolute path; given: {extra['directory']!r}")
    if vllm_config.parallel_config.nnodes > 1:
        raise ValueError(
            "TrivetECConnector keeps embeddings in one host's memory: it cannot serve an engine on several"
        )


def _shelf(extra: dict[str, Any], vllm_config: Any) -> Shelf:
    if vllm_config.model_config.is_encoder_decoder:
        log.warning("vLLM asks no connector for an encoder-decoder model: its embeddings are not kept")
        return NoShelf()
    if "capacity_gb" not in extra:
        return WorkerShelf(Path(extra["directory"]), vllm_config.parallel_config.data_parallel_index)
    if not extra["capacity_gb"]:
        return NoShelf()
    root, capacity = Path(extra.get("directory", ROOT)), round(extra["capacity_gb"] * 1e9)
    try:
        check_room(root, capacity, "capacity_gb")
        return OwnShelf(make_folder(root, "embeddings"), capacity)
    except SettingsError as error:
        raise ValueError(f"TrivetECConnector: {str(error).replace('tensors.directory', 'directory')}") from None


def _device() -> tuple[torch.device, bool]:
    """Where this worker's model is, and whether pinned memory gets there faster."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import PIN_MEMORY

    name = current_platform.device_type
    if current_platform.is_cuda_alike():
        # A bare "cuda" is the first device, for every rank.
        name = f"{name}:{current_platform.current_device()}"
    return torch.device(name), PIN_MEMORY and not current_platform.is_cpu()
