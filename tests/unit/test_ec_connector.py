"""The encoder-cache connector with vLLM's own classes and real files, driven as vLLM's scheduler and runner do it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ec_engine import PAGE, ROOM, ROWS, WIDTH, Engine, config, feature
from workers.embeddings.store import EmbeddingStore, final


@pytest.fixture(scope="module")
def connector(vllm: Any) -> Any:
    from workers import ec_connector

    return ec_connector


@pytest.fixture
def encode(torch: Any) -> Callable[[str, int], Any]:
    """An encoder whose answer tells which item it was given."""
    return lambda identifier, rows: torch.arange(rows * WIDTH).reshape(rows, WIDTH) + 1000.0 * len(identifier)


@pytest.fixture
def store(tmp_path: Path) -> EmbeddingStore:
    """The worker process's side."""
    return EmbeddingStore(tmp_path / "store", 3 * ROOM)


@pytest.fixture
def make(connector: Any, torch: Any, store: EmbeddingStore, encode: Any) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def one(role: str = "ec_both", extra: dict[str, Any] | None = None, **more: Any) -> Engine:
        extra = extra or {"directory": str(store.directory)}
        made.append(Engine(connector, config(torch, extra, role, **more), encode))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


def links(store: EmbeddingStore) -> list[Path]:
    return [path for path in store.directory.glob("held/**/*") if path.is_file()]


def fill(engine: Engine, store: EmbeddingStore, *names: str) -> None:
    """Have items encoded and stored, and forgotten by the engine."""
    for name in names:
        assert store.reserve(name, ROOM)
        engine.step(engine.ask(f"fill-{name}", feature(name)))
        engine.end(f"fill-{name}")
        assert store.commit(name)
    engine.drop_cache()
    engine.encoded.clear()


def test_a_stored_item_is_loaded_and_not_encoded(make: Any, store: EmbeddingStore, encode: Any, torch: Any) -> None:
    engine = make()
    fill(engine, store, "a")
    assert engine.stats() == {"encoded_items": 1, "encode_steps": 1, "saved_items": 1}
    engine.step(engine.ask("r", feature("a")))
    assert (engine.loaded, engine.encoded) == (["a"], [])
    assert torch.equal(engine.cache["a"], encode("a", ROWS))
    assert engine.stats() == {"loaded_items": 1}
    assert len(links(store)) == 1
    engine.end("r")
    assert links(store) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_bit_survives(make: Any, store: EmbeddingStore, torch: Any, dtype: str) -> None:
    engine = make()
    sent = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    # Not contiguous, as a slice of a batch may be, and with the values that comparisons lose.
    sent = torch.cat([sent, sent], 1)[:, WIDTH // 2 : WIDTH // 2 + WIDTH]
    sent[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    engine.encode = lambda *_: sent
    fill(engine, store, "a")
    engine.step(engine.ask("r", feature("a", pixels=False)))
    got = engine.cache["a"]
    assert got.dtype == sent.dtype and got.shape == sent.shape
    assert torch.equal(got.view(torch.uint8), sent.contiguous().view(torch.uint8))


def test_without_pixels_and_without_an_embedding_the_request_fails_alone(
    make: Any, store: EmbeddingStore, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    fill(engine, store, "a")
    lost = engine.ask("lost", feature("gone", pixels=False))
    fine = engine.ask("fine", feature("a", pixels=False))
    engine.step(lost, fine)
    assert engine.failed == {"lost"} and engine.loaded == ["a"]
    assert engine.stats()["unavailable"] == 1
    # Scheduled again before the failure was carried out, it is refused again and counted once.
    lost = engine.ask("lost again", feature("gone", pixels=False))
    engine.schedule(lost)
    engine.schedule(lost)
    engine.run()
    assert engine.failed == {"lost", "lost again"}
    engine.run()
    assert engine.stats()["unavailable"] == 1
    assert ["lost again" in one.message for one in caplog.records if "neither" in one.message] == [False, True]


def test_data_none_is_without_pixels(make: Any) -> None:
    engine = make()
    one = feature("a")
    one.data = None
    engine.step(engine.ask("r", one))
    assert engine.failed == {"r"} and engine.encoded == []


def test_what_is_computed_already_is_not_missed(make: Any) -> None:
    """A decode worker has the KV blocks and neither embedding nor pixels, until it loses the blocks."""
    engine = make("ec_consumer")
    request = engine.ask("r", feature("a", pixels=False))
    request.computed = 40
    for _ in range(3):
        engine.step(request)
    assert engine.failed == set() and engine.loaded == []
    request.computed = 0
    engine.step(request)
    assert engine.failed == {"r"}


def test_the_last_placeholder_counts(make: Any) -> None:
    engine = make("ec_consumer")
    request = engine.ask("r", feature("a", pixels=False))
    request.computed = 2 + ROWS + 2 - 1
    engine.step(request)
    assert engine.failed == {"r"}


def test_eviction_between_the_gate_and_the_load(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a")
    request = engine.ask("r", feature("a", pixels=False))
    engine.schedule(request)
    store.remove("a")
    engine.run()
    assert engine.loaded == ["a"]
    # Preempted, and all caches lost.
    engine.drop_cache()
    request.computed = 0
    engine.step(request)
    assert engine.loaded == ["a", "a"] and engine.failed == set()
    engine.end("r")
    engine.step(engine.ask("later", feature("a", pixels=False)))
    assert engine.failed == {"later"} and links(store) == []


def test_an_abort_waits_for_the_scheduled_load(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a")
    first, second = engine.ask("1", feature("a", pixels=False)), engine.ask("2", feature("a", pixels=False))
    engine.schedule(first)
    engine.schedule(second)
    store.remove("a")
    engine.end("1", "2")
    assert len(links(store)) == 2
    engine.run()
    assert engine.loaded == ["a"] and len(links(store)) == 1
    engine.run()
    assert links(store) == []


def test_an_aborted_request_that_never_ran_keeps_nothing(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a")
    request = engine.ask("r", feature("a"))
    assert engine.scheduler.ensure_cache_available(request, 0)
    assert len(links(store)) == 1
    engine.end("r")
    assert links(store) == []


def test_one_item_in_two_requests_and_twice_in_one(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a", "b")
    twice = engine.ask("twice", feature("a"), feature("b", offset=20), feature("a", offset=40))
    other = engine.ask("other", feature("a", pixels=False))
    engine.step(twice, other)
    assert (engine.loaded, engine.encoded) == (["a", "b"], [])
    assert len(links(store)) == 3
    engine.end("twice")
    engine.drop_cache()
    other.computed = 0
    engine.step(other)
    assert engine.failed == set()
    engine.end("other")
    assert links(store) == []


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "another's"])
@pytest.mark.parametrize("pixels", [True, False])
def test_a_damaged_file_is_not_used(make: Any, store: EmbeddingStore, damage: str, pixels: bool) -> None:
    engine = make()
    fill(engine, store, "a", "b")
    path = store.path("a")
    assert path is not None
    data = path.read_bytes()
    if damage == "another's":
        other = store.path("b")
        assert other is not None
        data = other.read_bytes()
    path.write_bytes({"cut": data[:-1], "garbage": b"\xff" * len(data), "empty": b"", "another's": data}[damage])
    engine.step(engine.ask("r", feature("a", pixels=pixels)))
    assert (engine.encoded, engine.failed) == ((["a"], set()) if pixels else ([], {"r"}))
    assert engine.loaded == [] and "a" not in [path.name for path in links(store)]


@pytest.mark.parametrize("shared", [False, True])
def test_one_name_for_two_sizes(make: Any, store: EmbeddingStore, shared: bool) -> None:
    """A request never loads another number of rows than its prompt has, whoever else holds that name."""
    engine = make()
    fill(engine, store, "a")
    requests = [engine.ask("large", feature("a", rows=ROWS + 1))]
    if shared:
        engine.scheduler.ensure_cache_available(engine.ask("small", feature("a")), 0)
    engine.step(*requests)
    assert (engine.encoded, engine.loaded) == (["a"], [])
    engine.end("large")
    engine.drop_cache()
    engine.step(engine.ask("lost", feature("a", rows=ROWS + 1, pixels=False)))
    assert engine.failed == {"lost"}


def test_what_is_in_vllms_cache_is_not_loaded(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a")
    engine.schedule(engine.ask("r", feature("a")))
    engine.cache["a"] = mine = engine.encode("a", ROWS)
    engine.run()
    assert engine.cache["a"] is mine


def test_an_item_that_comes_while_its_request_waits(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    request = engine.ask("r", feature("a"))
    assert engine.scheduler.ensure_cache_available(request, 0)
    assert not engine.scheduler.has_cache_item("a")
    fill(engine, store, "a")
    engine.step(request)
    assert (engine.loaded, engine.encoded) == (["a"], [])


def test_only_what_is_reserved_is_saved(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    engine.step(engine.ask("r", feature("a")))
    assert engine.encoded == ["a"] and store.size == 0
    assert [path for path in store.directory.iterdir() if path.is_file()] == []
    assert engine.stats() == {"encoded_items": 1, "encode_steps": 1, "not_saved": 1}


def test_items_encoded_before_are_saved_when_reserved(make: Any, store: EmbeddingStore) -> None:
    """vLLM's cache still has what the store has evicted: the encoder does not run, and the writer must all the same."""
    engine = make("ec_producer")
    engine.step(engine.ask("1", feature("a")))
    assert store.reserve("a", ROOM)
    engine.step(engine.ask("2", feature("a")))
    assert store.commit("a") and engine.encoded == ["a"]


@pytest.mark.parametrize("fault", ["too small", "folder gone", "odd type", "disk"])
def test_a_save_that_fails_stops_nothing(
    make: Any, store: EmbeddingStore, torch: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    path = store.reserve("a", PAGE + 4 if fault == "too small" else ROOM)
    assert path is not None
    if fault == "odd type":
        engine.encode = lambda *_: torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    elif fault == "disk":
        monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    engine.schedule(engine.ask("r", feature("a")))
    if fault == "folder gone":
        path.unlink()
    engine.run()
    assert engine.encoded == ["a"] and engine.stats()["not_saved"] == 1
    assert not path.exists() and not final(path).exists()
    assert store.commit("a") is None and store.size == 0


def test_only_the_first_worker_writes(make: Any, store: EmbeddingStore) -> None:
    engine = make(rank=1)
    path = store.reserve("a", ROOM)
    engine.step(engine.ask("r", feature("a")))
    assert path is not None and path.exists() and not final(path).exists()


def test_encode_worker(make: Any, store: EmbeddingStore) -> None:
    engine = make("ec_producer")
    for name in "ab":
        store.reserve(name, ROOM)
    engine.step(engine.ask("1", feature("a")), engine.ask("2", feature("b"), feature("c", offset=20)))
    assert store.commit("a") and store.commit("b")
    assert engine.stats() == {"encoded_items": 3, "encode_steps": 1, "saved_items": 2, "not_saved": 1}
    engine.drop_cache()
    engine.step(engine.ask("3", feature("a")))
    assert engine.encoded.count("a") == 2 and engine.loaded == []


def test_consumer_saves_nothing(make: Any, store: EmbeddingStore) -> None:
    engine = make("ec_consumer")
    store.reserve("a", ROOM)
    engine.step(engine.ask("r", feature("a")))
    assert engine.encoded == ["a"] and store.commit("a") is None
    assert engine.stats() == {"encoded_items": 1, "encode_steps": 1}


def test_a_session_that_adds_media(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a", "b")
    request = engine.ask("r", feature("a", pixels=False))
    engine.step(request)
    request.mm_features.append(feature("b", offset=20, pixels=False))
    engine.step(request)
    request.mm_features.append(feature("gone", offset=40, pixels=False))
    engine.step(request)
    assert engine.loaded == ["a", "b"] and engine.failed == {"r"}
    assert links(store) == []


def test_links_left_by_a_killed_engine(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a")
    engine.step(engine.ask("r", feature("a")))
    assert len(links(store)) == 1
    make()
    assert links(store) == []


def test_shutdown_drops_the_links(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a")
    engine.step(engine.ask("r", feature("a")))
    engine.close()
    assert links(store) == [] and store.has("a") and not (store.directory / "held").exists()


def test_two_ranks_share_a_folder(make: Any, store: EmbeddingStore) -> None:
    engine = make()
    fill(engine, store, "a")
    other = make(data_parallel_index=1)
    engine.step(engine.ask("r", feature("a")))
    other.step(other.ask("r", feature("a")))
    other.close()
    assert len(links(store)) == 1


def test_a_request_preempted_in_the_pass_that_scheduled_it(make: Any, store: EmbeddingStore) -> None:
    """It encodes nothing then, but what it loads is in vLLM's books."""
    from vllm.v1.core.sched.output import SchedulerOutput

    engine = make()
    fill(engine, store, "a")
    engine.stats()
    request = engine.ask("r", feature("a"), feature("b", offset=20))
    assert engine.scheduler.ensure_cache_available(request, 0)
    for index in (0, 1):
        engine.scheduler.update_state_after_alloc(request, index)
    step = engine.scheduler.build_connector_meta(SchedulerOutput.make_empty())
    assert [one.identifier for one in step.loads] == ["a"] and step.saves == {}
    engine.scheduler.take_unavailable_requests()
    assert engine.stats() == {"loaded_items": 1}


# Without a worker process around the engine


@pytest.fixture
def alone(make: Any, tmp_path: Path) -> Callable[..., Engine]:
    (tmp_path / "root").mkdir()
    return lambda items=3, **more: make(
        extra={"capacity_gb": (items * ROOM + 1) / 1e9, "directory": str(tmp_path / "root")}, **more
    )


def folder(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "root").rglob("*") if path.is_file() and path.stat().st_size > PAGE]


def test_alone_the_engine_keeps_its_own(alone: Any, tmp_path: Path, encode: Any, torch: Any) -> None:
    engine = alone()
    engine.step(engine.ask("1", feature("../../etc/x")))
    engine.end("1")
    engine.drop_cache()
    engine.step(engine.ask("2", feature("../../etc/x")))
    assert (engine.encoded, engine.loaded) == (["../../etc/x"], ["../../etc/x"])
    assert torch.equal(engine.cache["../../etc/x"], encode("../../etc/x", ROWS))
    assert engine.stats() == {"encoded_items": 1, "encode_steps": 1, "saved_items": 1, "loaded_items": 1}
    assert len(folder(tmp_path)) == 1
    engine.close()
    assert list((tmp_path / "root").glob("*/*")) == []


def test_alone_a_killed_engine_leaves_nothing(tmp_path: Path) -> None:
    """vLLM ends its engine process with SIGKILL, a moment after it has asked."""
    program = """
import os, signal, sys
from pathlib import Path
from app.tensors.folder import make_folder
from workers.embeddings.shelves import OwnShelf

shelf = OwnShelf(make_folder(Path(sys.argv[1]), "embeddings"), 10_000)
assert shelf.reserved("a", 5000).exists()
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    end = time.monotonic() + 10
    while left := list(tmp_path.glob("*/*")):
        assert time.monotonic() < end, left
        time.sleep(0.01)


def test_alone_never_more_than_the_capacity(alone: Any, tmp_path: Path) -> None:
    engine = alone()
    for number in range(10):
        engine.step(engine.ask(f"{number}", feature(f"item{number}")))
        engine.end(f"{number}")
        assert len(folder(tmp_path)) == min(number + 1, 3)
    engine.drop_cache()
    engine.step(*(engine.ask(f"again{number}", feature(f"item{number}")) for number in (0, 7, 8, 9)))
    assert engine.loaded == ["item7", "item8", "item9"]


def test_alone_running_requests_keep_theirs(alone: Any) -> None:
    engine = alone(items=1)
    engine.step(engine.ask("1", feature("a")))
    engine.end("1")
    engine.drop_cache()
    held = engine.ask("2", feature("a"))
    engine.step(held)
    engine.step(engine.ask("3", feature("b")))
    assert engine.stats()["not_saved"] == 1
    engine.drop_cache()
    held.computed = 0
    engine.step(held)
    assert engine.loaded == ["a", "a"]
    engine.end("2")
    engine.step(engine.ask("4", feature("c")))
    assert engine.stats()["saved_items"] == 1


def test_alone_an_unmeasured_modality_is_not_stored(alone: Any, tmp_path: Path) -> None:
    engine = alone()
    engine.step(engine.ask("1", feature("a", modality="audio")))
    assert engine.stats() == {"encoded_items": 1, "encode_steps": 1, "not_saved": 1}
    assert folder(tmp_path) == []


def test_alone_prompt_embeddings_are_not_items(alone: Any) -> None:
    engine = alone()
    engine.step(engine.ask("1", feature("a", modality="prompt_embeds")))
    assert engine.stats() == {}


def test_capacity_zero_does_nothing_but_protect(make: Any, tmp_path: Path) -> None:
    engine = make(extra={"capacity_gb": 0, "directory": str(tmp_path / "root")})
    engine.step(engine.ask("1", feature("a")), engine.ask("2", feature("b", pixels=False)))
    assert engine.encoded == ["a"] and engine.failed == {"2"}
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "given: nothing"),
        ({"capacity": 1}, "given: capacity"),
        ({"capacity_gb": -1}, "from 0; given: -1"),
        ({"capacity_gb": "4"}, "from 0; given: '4'"),
        ({"directory": "relative"}, "absolute"),
    ],
)
def test_wrong_configurations(connector: Any, torch: Any, extra: dict[str, Any], message: str) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    with pytest.raises(ValueError, match=message):
        connector.TrivetECConnector(config(torch, extra), ECConnectorRole.WORKER)


def test_one_host_only(connector: Any, torch: Any) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    with pytest.raises(ValueError, match="one host"):
        connector.TrivetECConnector(config(torch, {"capacity_gb": 1}, nnodes=2), ECConnectorRole.SCHEDULER)


def test_encoder_decoder_models_have_no_hooks(connector: Any, torch: Any, encode: Any) -> None:
    made = config(torch, {"capacity_gb": 1})
    made.model_config.is_encoder_decoder = True
    engine = Engine(connector, made, encode)
    engine.step(engine.ask("1", feature("a")))
    engine.drop_cache()
    engine.step(engine.ask("2", feature("a")))
    assert engine.loaded == []


def test_statistics_reach_prometheus(connector: Any, torch: Any) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    types = {kind: kind for kind in (Counter, Gauge, Histogram)}
    for _ in range(2):  # a second engine in one process
        metrics = connector.TrivetECConnector.build_prom_metrics(
            config(torch, {"capacity_gb": 1}), types, ["engine"], {0: ["0"]}
        )
    stats = connector.TrivetECConnector.build_ec_connector_stats({"encoded_items": 2})
    both = stats.aggregate(connector.TrivetECConnector.build_ec_connector_stats({"encoded_items": 1, "unavailable": 1}))
    assert both.reduce() == {"encoded_items": 3, "unavailable": 1} and not both.is_empty()
    metrics.observe(both.data)
    metrics.observe({"encoded_items": 1})
    assert REGISTRY.get_sample_value("trivet:ec_encoded_items_total", {"engine": "0"}) == 4
    assert REGISTRY.get_sample_value("trivet:ec_loaded_items_total", {"engine": "0"}) == 0
    both.reset()
    assert both.is_empty()


@pytest.mark.parametrize("again", [False, True])
def test_room_that_was_given_back_meanwhile_is_not_written_to(
    vllm: Any, store: EmbeddingStore, torch: Any, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The worker gives it back while the engine is at it, and may have reserved it anew."""
    from workers.embeddings import tensor_files

    reserved = store.reserve("a", ROOM)
    assert reserved is not None
    size = tensor_files._fill

    def late(*arguments: Any) -> None:
        store.abandon("a")
        if again:
            store.reserve("a", ROOM)
        size(*arguments)

    monkeypatch.setattr(tensor_files, "_fill", late)
    with pytest.raises(FileNotFoundError):
        tensor_files.write(reserved, "a", torch.zeros(ROWS, WIDTH))
    assert [path.name for path in store.directory.iterdir() if path.is_file()] == ([reserved.name] if again else [])
    store.abandon("a")
    with pytest.raises(FileNotFoundError):
        tensor_files.write(reserved, "a", torch.zeros(ROWS, WIDTH))
    assert not final(reserved).exists() and not reserved.exists()
