"""workers.engine_args: from settings and roles to vLLM's arguments and environment."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app import ports
from app.roles import Role
from app.settings import Settings, SettingsError
from app.settings_sections import ApiSettings, EngineSettings, WorkerSettings
from workers import engine_args

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test sets is gone after it, and nothing that concerns engines is set before."""
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(("VLLM_", "UCX_", "OMP_", "CUDA_")):
                del os.environ[name]
        before = len(ports._held)
        yield
        for held in ports._held[before:]:
            held.close()
        del ports._held[before:]


def settings(*roles: Role, **engine: Any) -> Settings:
    worker = WorkerSettings(roles=frozenset(roles or {E, P, D}))
    api = ApiSettings(reasoning_parser="none")  # there is no such model to ask
    return Settings(model="m", enable_multimodal=True, worker=worker, engine=EngineSettings(**engine), api=api)


FLAGS = {
    "args": '--a 1 --json \'{"x": "y z"}\'',
    "encode_args": "--e",
    "prefill_args": "--p 'two words'",
    "decode_args": "--d",
}


@pytest.mark.parametrize(
    ("roles", "more"),
    [
        ((D,), ["--d"]),
        ((P,), ["--p", "two words"]),
        ((E, P), ["--e", "--p", "two words"]),
        ((E, P, D), ["--e", "--p", "two words", "--d"]),
    ],
)
def test_flags_of_the_roles_come_after_the_common_ones(roles: tuple[Role, ...], more: list[str]) -> None:
    assert engine_args.flags(settings(*roles, **FLAGS)) == ["--a", "1", "--json", '{"x": "y z"}', *more]


def test_vllm_reads_media_as_large_as_the_api_takes(vllm: Any) -> None:
    from vllm import envs

    chosen = settings()
    chosen.media.max_item_mb, chosen.media.max_audio_seconds = 100.5, 1800.0
    os.environ["VLLM_MAX_IMAGE_PIXELS"] = "7"  # what the user set is kept
    engine_args.prepare_environment(chosen)
    assert envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB == 101
    assert envs.VLLM_MAX_AUDIO_DECODE_DURATION_S == 1800
    assert envs.VLLM_MAX_AUDIO_DECODE_BYTES == 256_000_000
    assert envs.VLLM_MAX_IMAGE_PIXELS == 7


def test_the_gpu_is_the_settings_unless_they_say_nothing() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    engine_args.prepare_environment(settings())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    pinned = settings()
    pinned.worker.gpu = "1,2"
    engine_args.prepare_environment(pinned)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_two_engines_on_a_host_have_two_side_channels() -> None:
    seen = set()
    for _ in range(10):
        engine_args._side_channel_port.cache_clear()  # as in a process of its own
        engine_args.prepare_environment(settings())
        port = os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        engine_args.prepare_environment(settings())
        assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == port, "one for each process"
        seen.add(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    assert len(seen) == 10 and os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"


def test_engines_of_a_host_share_its_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    engine_args.prepare_cpu(settings(per_host=1))
    assert os.environ.pop("OMP_NUM_THREADS") == str(max(1, cores - 1)), "one is not theirs"
    engine_args.prepare_cpu(settings(per_host=cores * 2))
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_is_kept() -> None:
    os.environ.update({"OMP_NUM_THREADS": "3", "UCX_TLS": "rc", "VLLM_LOGGING_LEVEL": "ERROR"})
    engine_args.prepare_environment(settings())
    engine_args.prepare_cpu(settings())
    kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "UCX_TLS", "VLLM_LOGGING_LEVEL")}
    assert kept == {"OMP_NUM_THREADS": "3", "UCX_TLS": "rc", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("roles", "kv_role"),
    [((E, P, D), None), ((P, D), None), ((E, P), "kv_producer"), ((P,), "kv_producer"), ((D,), "kv_consumer")],
)
def test_an_engine_transfers_blocks_when_it_has_one_half(roles: tuple[Role, ...], kv_role: str | None) -> None:
    args = engine_args.build(settings(*roles, kv_lease_s=77.0), None)
    transfer = args.kv_transfer_config
    assert (transfer.kv_role if transfer else None) == kv_role
    if transfer:
        assert transfer.kv_connector == "NixlConnector"
        assert transfer.kv_load_failure_policy == "fail"
        assert transfer.kv_connector_extra_config["kv_lease_duration"] == 77.0
    assert args.mm_processor_cache_gb == 0, "a cached item may be one without pixels"
    assert args.ec_transfer_config is None


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("roles", "ec_role"),
    [((E,), "ec_producer"), ((E, P), "ec_both"), ((P,), "ec_both"), ((E, D), "ec_both"), ((E, P, D), "ec_both")],
)
def test_embeddings_go_through_the_workers_store(roles: tuple[Role, ...], ec_role: str, tmp_path: Path) -> None:
    transfer = engine_args.build(settings(*roles), tmp_path).ec_transfer_config
    assert (transfer.ec_role, transfer.ec_connector_module_path) == (ec_role, "workers.ec_connector")
    assert transfer.ec_connector_extra_config == {"directory": str(tmp_path)}


@pytest.mark.usefixtures("vllm")
def test_a_transfer_that_the_user_chose_is_kept() -> None:
    chosen = '--kv-transfer-config \'{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}\''
    assert engine_args.build(settings(D, args=chosen), None).kv_transfer_config.kv_connector == "ExampleConnector"


@pytest.mark.usefixtures("vllm")
def test_kv_events_are_published_in_the_workers_own_folder(tmp_path: Path) -> None:
    events = engine_args.build(settings(), None, tmp_path).kv_events_config
    assert events.enable_kv_cache_events and events.publisher == "zmq"
    for address in (events.endpoint, events.replay_endpoint):
        assert address.startswith(f"ipc://{tmp_path}/")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("args", "folder"), [("", None), ("--no-enable-prefix-caching", Path("/s")), ("--kv-events-config {}", Path("/s"))]
)
def test_kv_events_are_off_without_a_cache_and_as_the_user_chose(args: str, folder: Path | None) -> None:
    chosen = engine_args.build(settings(args=args), None, folder).kv_events_config
    assert chosen is None or not chosen.enable_kv_cache_events


@pytest.mark.usefixtures("vllm")
def test_engines_of_a_host_share_its_memory() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("a GPU's memory is its engine's own")
    one = engine_args.build(settings(per_host=1), None).kv_cache_memory_bytes
    ten = engine_args.build(settings(per_host=10), None).kv_cache_memory_bytes
    assert 5 < one / ten < 20
    assert engine_args.build(settings(args="--kv-cache-memory-bytes 1000"), None).kv_cache_memory_bytes == 1000


@pytest.mark.usefixtures("vllm")
def test_a_wrong_flag_names_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"TRIVET_ENGINE__ARGS.*--nonsense"):
        engine_args.build(settings(args="--nonsense"), None)
