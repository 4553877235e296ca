"""app.launch.plan and app.launch.gpus: worker names, GPUs, command lines and environments."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.launch import gpus, plan
from app.launch.errors import LaunchError
from app.roles import ALL, Role
from app.settings import Settings
from app.settings_sections import EngineSettings


def settings(**flags: Any) -> Settings:
    return Settings(model="m", enable_multimodal=True, **flags)


def ids(topology: str, counts: dict[str, int], devices: list[str], name: str = "default", **flags: Any) -> list[str]:
    return [one.id for one in plan.engines(settings(**flags), topology, counts, devices, name)]


def test_replicas_are_named_by_kind() -> None:
    assert plan.replicas("pd", None) == {"prefill": 1, "decode": 1}
    assert plan.replicas("pd", "prefill=2, decode=3") == {"prefill": 2, "decode": 3}
    assert plan.replicas("agg", "4") == {"agg": 4}


@pytest.mark.parametrize("given", ["2", "agg=1", "prefill=0", "prefill=x", "prefill", "=2"])
def test_other_replicas_are_refused(given: str) -> None:
    with pytest.raises(LaunchError, match="prefill=2,decode=2"):
        plan.replicas("pd", given)


def test_without_media_nobody_encodes() -> None:
    text = plan.engines(Settings(model="m"), "pd", {"prefill": 1, "decode": 1}, [], "default")
    assert [one.roles for one in text] == [{Role.PREFILL}, {Role.DECODE}]
    (both,) = plan.engines(settings(), "agg", {"agg": 1}, [], "default")
    assert both.roles == ALL


def test_each_worker_has_a_gpu_of_its_own_while_they_last() -> None:
    assert ids("pd", {"prefill": 2, "decode": 1}, ["0", "1", "2"]) == ["prefill@gpu0", "prefill@gpu1", "decode@gpu2"]


def test_more_workers_than_gpus_share_and_their_names_stay_apart() -> None:
    made = plan.engines(settings(), "pd", {"prefill": 2, "decode": 2}, ["3"], "default")
    assert [one.id for one in made] == ["prefill@gpu3", "prefill@gpu3.2", "decode@gpu3", "decode@gpu3.2"]
    assert {one.sharers for one in made} == {4}
    two = plan.engines(settings(), "agg", {"agg": 3}, ["0", "1"], "default")
    assert [(one.id, one.sharers) for one in two] == [("agg@gpu0", 2), ("agg@gpu1", 1), ("agg@gpu0.2", 2)]


def test_without_gpus_workers_are_numbered() -> None:
    assert ids("pd", {"prefill": 2, "decode": 1}, []) == ["prefill@cpu0", "prefill@cpu1", "decode@cpu0"]


def test_the_name_of_the_up_keeps_two_of_them_apart() -> None:
    assert ids("agg", {"agg": 1}, ["0"], "blue") == ["agg@blue-gpu0"]
    assert ids("agg", {"agg": 1}, [], "blue") == ["agg@blue-cpu0"]


def test_parallel_engines_get_as_many_gpus_as_they_need() -> None:
    engine = EngineSettings(args="--tensor-parallel-size 2", decode_args="-tp 1 --pipeline_parallel_size=3")
    assert ids("pd", {"prefill": 1, "decode": 1}, list("01234"), engine=engine) == ["prefill@gpu0-1", "decode@gpu2-3-4"]
    with pytest.raises(LaunchError, match="needs 2 GPUs and there are 1"):
        ids("pd", {"prefill": 1, "decode": 1}, ["0"], engine=engine)


def test_a_workers_process(tmp_path: Path) -> None:
    chosen = settings(engine=EngineSettings(args="--dtype half"))
    (one,) = plan.engines(chosen, "agg", {"agg": 1}, ["0"], "default")
    spec = plan.worker(one, chosen, {"A": "b"}, 3, tmp_path)
    assert spec.argv[1:7] == ("-m", "celery", "-A", "app.celery", "worker", "-n")
    assert spec.argv[7] == "agg@gpu0"
    assert spec.log == tmp_path / "agg@gpu0.log"
    assert dict(spec.environment) == {
        "A": "b",
        "TRIVET_WORKER__ROLES": "decode,encode,prefill",
        "TRIVET_WORKER__GPU": "0",
        "TRIVET_ENGINE__PER_HOST": "3",
    }


def test_engines_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    chosen = settings(engine=EngineSettings(args="--gpu-memory-utilization 0.3"))
    one, _ = plan.engines(chosen, "pd", {"prefill": 1, "decode": 1}, ["0"], "default")
    args = plan.worker(one, chosen, {}, 2, tmp_path).environment["TRIVET_ENGINE__ARGS"]
    assert args == "--gpu-memory-utilization 0.450 --gpu-memory-utilization 0.3"


def test_children_get_exactly_these_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of the file or the environment that flags have overruled, be it with a default."""
    (tmp_path / "trivet.toml").write_text("[api]\nport = 1\n[media]\nmax_items = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIVET_STREAM__REPLAY_BATCHES", "77")
    monkeypatch.setenv("TRIVET_DEVICE", "cpu")
    chosen = Settings(model="a model", api={"port": 8000}, stream={"replay_batches": 2000})  # type: ignore[arg-type]
    environment = plan.child_environment(chosen, tmp_path)
    assert environment["TRIVET_DEVICE"] == "cpu"
    code = "from app import settings; print(settings.load().model_dump_json())"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert Settings.model_validate_json(answer.stdout) == chosen


@pytest.mark.parametrize("module", ["app.celery", "workers.tasks", "api.main"])
def test_a_folder_of_the_users_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str
) -> None:
    package = module.partition(".")[0]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    environment = plan.child_environment(settings(), tmp_path)
    # As Celery and uvicorn look their application up: the working directory comes first if it isn't on the path yet.
    code = f"from celery.utils.imports import import_from_cwd; print(import_from_cwd('{package}').__file__)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert Path(answer.stdout.strip()).parents[1] == plan.ROOT


def test_api_and_flower_listen_where_the_settings_say(tmp_path: Path) -> None:
    chosen = Settings(api={"host": "::1", "port": 81}, flower={"port": 82}, log_level="ERROR")  # type: ignore[arg-type]
    api = " ".join(plan.api(chosen, {}, tmp_path, tmp_path).argv)
    assert "uvicorn --app-dir" in api
    assert "api.main:app --http api.http_protocol:BoundedHttp --host ::1 --port 81 --no-access-log" in api
    assert api.endswith(" --timeout-graceful-shutdown 5 --log-level error")
    flower = plan.flower(chosen, {}, tmp_path).argv
    assert flower[4:7] == ("app.celery", "flower", "--address=127.0.0.1")
    assert "--port=82" in flower


def test_several_processes_of_the_api_share_their_metrics(tmp_path: Path) -> None:
    spec = plan.api(Settings(api={"workers": 3}), {}, tmp_path, tmp_path / "metrics")  # type: ignore[arg-type]
    assert spec.argv[-4:] == ("--workers", "3", "--timeout-worker-healthcheck", "60")
    assert spec.environment["PROMETHEUS_MULTIPROC_DIR"] == str(tmp_path / "metrics")
    alone = plan.api(Settings(), {}, tmp_path, tmp_path / "metrics")
    assert "--workers" not in alone.argv and "PROMETHEUS_MULTIPROC_DIR" not in alone.environment


def test_flowers_options_are_ones_that_it_knows(tmp_path: Path) -> None:
    """Flower passes unknown options over in silence."""
    from flower.command import is_flower_option

    options = plan.flower(Settings(), {}, tmp_path).argv[6:]
    assert len(options) == 4
    assert all(is_flower_option(one) for one in options)


def test_gpus_are_those_asked_for_or_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert gpus.available(None) == ["4", "5"]
    assert gpus.available("0, 2") == ["0", "2"]
    assert gpus.available("") == []


def test_gpus_are_listed_by_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho '  MIG 1g.18gb Device 0: (UUID: MIG-1)'\n"
        "echo 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "cpu_build", lambda: False)
    assert gpus.available(None) == ["0", "1"]
    monkeypatch.setattr(gpus, "cpu_build", lambda: True)
    assert gpus.available(None) == []
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpus.listed() == []
