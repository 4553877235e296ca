"""One engine's encoder-cache connectors, and as much of vLLM's scheduler and runner as they meet."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace as Plain
from typing import Any

from app.tensors import segment

ROWS, WIDTH = 6, 8
PAGE = segment.PAGE
ROOM = PAGE + ROWS * WIDTH * 4


class EngineDied(Exception):
    """What would have killed an EngineCore."""


def config(torch: Any, extra: dict[str, Any], role: str = "ec_both", dtype: str = "float32", **parallel: Any) -> Any:
    from vllm.config import ECTransferConfig

    transfer = ECTransferConfig(
        ec_connector="TrivetECConnector",
        ec_connector_module_path="workers.ec_connector",
        ec_role=role,
        ec_connector_extra_config=extra,
    )
    transfer.mm_encoder_output_widths = {"image": WIDTH}
    return Plain(
        ec_transfer_config=transfer,
        parallel_config=Plain(**{"rank": 0, "nnodes": 1, "data_parallel_index": 0, **parallel}),
        model_config=Plain(dtype=getattr(torch, dtype), is_encoder_decoder=False),
    )


def feature(identifier: str, offset: int = 2, rows: int = ROWS, pixels: bool = True, modality: str = "image") -> Any:
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    fields = {"grid": MultiModalFieldElem(torch.tensor([1, 2, 3]), MultiModalBatchedField(keep_on_cpu=True))}
    if pixels:
        fields["pixel_values"] = MultiModalFieldElem(torch.zeros(4), MultiModalBatchedField())
    # Two tokens of each placeholder stand for no embedding.
    mask = torch.tensor([False] + [True] * rows + [False])
    place = PlaceholderRange(offset, rows + 2, mask)
    return MultiModalFeatureSpec(MultiModalKwargsItem(fields), modality, identifier, place, identifier)


class Engine:
    """`encode` is the encoder. A step does to every request what vLLM does: ask the gate, look into the encoder cache,
    load or encode what is missing. Anything that would kill an EngineCore raises.
    """

    def __init__(self, connector: Any, vllm_config: Any, encode: Callable[[str, int], Any]) -> None:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        self.scheduler = connector.TrivetECConnector(vllm_config, ECConnectorRole.SCHEDULER)
        self.worker = connector.TrivetECConnector(vllm_config, ECConnectorRole.WORKER)
        self.encode = encode
        self.cache: dict[str, Any] = {}
        self.encoded: list[str] = []
        self.loaded: list[str] = []
        self.failed: set[str] = set()
        self.requests: dict[str, Any] = {}
        self._flying: list[tuple[Any, Any, list[Any]]] = []

    def ask(self, name: str, *features: Any) -> Any:
        self.requests[name] = Plain(request_id=name, mm_features=list(features), computed=0)
        return self.requests[name]

    def end(self, *names: str) -> None:
        for name in names:
            assert self.scheduler.request_finished(self.requests.pop(name)) == (False, None)

    def drop_cache(self) -> None:
        self.cache.clear()

    def schedule(self, *requests: Any) -> None:
        """Plan a step, which `run` carries out: later, as with asynchronous scheduling."""
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        here: set[str] = set()
        features = []
        for request in requests:
            if not self.scheduler.ensure_cache_available(request, request.computed):
                continue
            output.num_scheduled_tokens[request.request_id] = 1
            output.scheduled_new_reqs.append(request)
            wanted = []
            for index, one in enumerate(request.mm_features):
                place = one.mm_position
                if place.offset + place.length <= request.computed:
                    continue
                features.append(one)
                if one.identifier in self.cache or one.identifier in here:
                    continue
                here.add(one.identifier)
                wanted.append(index)
                if not self.scheduler.has_cache_item(one.identifier):
                    output.scheduled_encoder_inputs.setdefault(request.request_id, []).append(index)
            for index in wanted:
                self.scheduler.update_state_after_alloc(request, index)
        step = self.scheduler.build_connector_meta(output)
        self._flying.append((output, pickle.loads(pickle.dumps(step)), features))

    def run(self) -> None:
        output, step, features = self._flying.pop(0)
        self.worker.bind_connector_metadata(step)
        if self.worker.is_producer:
            self.worker.start_save_caches(encoder_cache=self.cache)
        if self.worker.is_consumer:
            before = set(self.cache)
            self.worker.start_load_caches(self.cache)
            self.loaded += sorted(self.cache.keys() - before)
        for name, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                one = next(r for r in output.scheduled_new_reqs if r.request_id == name).mm_features[index]
                if "pixel_values" not in one.data:
                    raise EngineDied(f"the encoder ran on {one.identifier}, which has no pixels")
                self.cache[one.identifier] = self.encode(one.identifier, one.mm_position.get_num_embeds())
                self.encoded.append(one.identifier)
                self.worker.save_caches(self.cache, one.identifier)
        for one in features:
            if len(self.cache[one.identifier]) != one.mm_position.get_num_embeds():
                raise EngineDied(f"{one.identifier}: wrong number of rows")
        self.worker.clear_connector_metadata()
        for name in self.scheduler.take_unavailable_requests():
            self.failed.add(name)
            self.end(name)
        for request in output.scheduled_new_reqs:
            places = [one.mm_position for one in request.mm_features]
            request.computed = max([request.computed, *(place.offset + place.length for place in places)])

    def step(self, *requests: Any) -> None:
        self.schedule(*requests)
        self.run()

    def stats(self) -> dict[str, int]:
        return {name: count for name, count in self.scheduler.get_ec_connector_stats().data.items() if count}

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
