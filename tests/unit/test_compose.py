"""docker-compose.yml and the images that it builds, checked without an engine to run them."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from app import settings
from app.redis import EVICTING_POLICIES
from app.roles import KVRole, Role, kv_role
from tests.command_lines import ROOT, check
from workers import preflight
from workers.items import service as items

PROFILES = ("cpu", "gpu")
#: Profile -> the one that adds an encode worker to it.
MORE = {"cpu": "encode-cpu", "gpu": "encode-gpu"}
APIS = ("api-cpu", "api-gpu")
#: What `--profile` is given, once or twice.
STARTED = [*([one] for one in PROFILES), *([one, more] for one, more in MORE.items())]
REQUIRED = {"FLOWER_BASIC_AUTH": "user:password"}


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """What Compose makes of `${NAME}`, `${NAME:-default}` and `${NAME:?reason}`, nested ones too."""
    if isinstance(value, dict):
        return {name: interpolated(one, variables) for name, one in value.items()}
    if isinstance(value, list):
        return [interpolated(one, variables) for one in value]
    while isinstance(value, str) and (innermost := re.search(r"\$\{(\w+)(?::([-?])([^${}]*))?\}", value)):
        name, kind, text = innermost.groups()
        given = variables.get(name, "")
        if not given and kind == "?":
            raise KeyError(f"{name}: {text}")
        value = value[: innermost.start()] + (given or text or "") + value[innermost.end() :]
    return value


def compose(**variables: str) -> dict[str, Any]:
    made: dict[str, Any] = interpolated(yaml.safe_load((ROOT / "docker-compose.yml").read_text()), REQUIRED | variables)
    return made


def services(profiles: list[str] | None = None, **variables: str) -> dict[str, dict[str, Any]]:
    """All services, or those that `--profile` starts."""
    found = compose(**variables)["services"]
    return {
        name: one
        for name, one in found.items()
        if profiles is None or not one.get("profiles") or set(profiles) & set(one["profiles"])
    }


def command(service: dict[str, Any]) -> list[str]:
    return shlex.split(service.get("command", ""))


def worker_names() -> list[str]:
    return [name for name, one in services().items() if "worker" in command(one)]


def chosen(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> settings.Settings:
    """The settings that the service's process has."""
    for variable in [one for one in os.environ if one.startswith(settings.ENV_PREFIX)]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    for variable, value in services()[name].get("environment", {}).items():
        monkeypatch.setenv(variable, value)
    flags: dict[str, Any] = {}
    if name in worker_names():
        context = check(command(services()[name]))
        given = settings.load().model_dump(exclude_unset=True)["worker"]
        flags = {"worker": given | {"roles": context.params["roles"]}}
    return settings.load(**flags)


def test_the_file_is_valid_under_the_compose_specification() -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(compose())] == []
    assert list(validator.iter_errors({"services": {"a": {"comand": "x"}}})), "the schema must refuse something"


@pytest.mark.parametrize("profiles", STARTED)
def test_a_profile_has_every_part_and_a_worker_for_every_role(profiles: list[str]) -> None:
    started = services(profiles)
    assert {"redis", f"api-{profiles[0]}", "flower"} <= started.keys()
    roles = [frozenset(map(Role, roles_of(one))) for one in started.values() if "worker" in command(one)]
    assert frozenset().union(*roles) == frozenset(Role)
    alone = [one for one in roles if one == {Role.ENCODE}]
    assert len(alone) == len(profiles) - 1
    assert {kv_role(one) for one in roles if one not in alone} == {KVRole.PRODUCER, KVRole.CONSUMER}


def roles_of(service: dict[str, Any]) -> list[str]:
    words = command(service)
    return words[words.index("--roles") + 1].split(",")


@pytest.mark.parametrize("name", [name for name, one in services().items() if name != "redis"])
def test_the_real_program_takes_the_command(name: str) -> None:
    check(command(services()[name]))


@pytest.mark.parametrize("name", [name for name, one in services().items() if "environment" in one])
def test_the_settings_load(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = chosen(name, monkeypatch, tmp_path)
    assert (loaded.model, loaded.served_name) == ("/models/tiny", "tiny")
    assert loaded.redis.wait and loaded.redis.broker_url == "redis://redis:6379/0"
    if name in worker_names():
        preflight.check(loaded)
        known = {settings.variable(path) for path in settings.known()}
        own = services()[name]["environment"]
        assert {one for one in own if one.startswith(settings.ENV_PREFIX)} <= known


@pytest.mark.parametrize("name", worker_names())
def test_a_worker_is_reachable_under_its_own_name(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = chosen(name, monkeypatch, tmp_path)
    assert loaded.worker.side_channel_host == loaded.worker.metrics_host == loaded.tensors.host == name


@pytest.mark.parametrize("name", APIS)
def test_an_api_is_reachable_under_its_own_name(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert chosen(name, monkeypatch, tmp_path).tensors.host == name


@pytest.mark.parametrize("profiles", STARTED)
def test_api_and_workers_have_equal_engine_arguments(
    profiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [name for name in services(profiles) if name in (*APIS, *worker_names())]
    assert len(names) == len(profiles) + 2
    assert len({chosen(name, monkeypatch, tmp_path).engine.args for name in names}) == 1


@pytest.mark.parametrize("profiles", STARTED)
def test_api_and_workers_have_one_memory_that_is_large_enough(
    profiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = 0.0
    for name in [one for one in services(profiles) if one in (*APIS, *worker_names())]:
        loaded = chosen(name, monkeypatch, tmp_path)
        assert f"tensors:{loaded.tensors.directory}" in services()[name]["volumes"]
        if name in APIS:
            wanted += loaded.tensors.media_gb
        elif items.wanted(loaded):
            wanted += loaded.multimodal_embedding_cache_capacity_gb
    volume = compose()["volumes"]["tensors"]["driver_opts"]
    assert volume["type"] == "tmpfs"
    size, mode = re.fullmatch(r"size=(\d+)g,mode=(\d+)", volume["o"]).groups()  # type: ignore[union-attr]
    assert 2 < wanted <= int(size) * (1 << 30) / 1e9
    assert int(mode, 8) == 0o1777


@pytest.mark.parametrize("profiles", STARTED)
def test_no_two_workers_of_a_profile_share_a_name_or_a_gpu(profiles: list[str]) -> None:
    workers = [one for one in services(profiles).values() if "worker" in command(one)]
    names = [command(one)[command(one).index("-n") + 1] for one in workers]
    assert len(set(names)) == len(names) and all("@" in name for name in names)
    if "gpu" in profiles:
        devices = [one["deploy"]["resources"]["reservations"]["devices"] for one in workers]
        assert len({tuple(device["device_ids"]) for (device,) in devices}) == len(workers)


def test_the_model_is_served_under_its_own_name() -> None:
    other = services(TRIVET_MODEL="Some/Model")["api-gpu"]["environment"]
    assert (other["TRIVET_MODEL"], other["TRIVET_SERVED_MODEL_NAME"]) == ("Some/Model", "Some/Model")


def test_ports_are_published_on_loopback_alone_and_redis_is_not() -> None:
    published = {name: one["ports"] for name, one in services().items() if "ports" in one}
    assert set(published) == {*APIS, "flower"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_keys_are_for_the_api_alone() -> None:
    """Every container has `.env` whole; what `environment` says is stronger."""
    variable = "TRIVET_API__API_KEYS"
    values = {
        name: one["environment"][variable] for name, one in services(None, **{variable: "k"}).items() if name != "redis"
    }
    assert {name for name, value in values.items() if value} == set(APIS)
    assert {values[name] for name in APIS} == {"k"}


def test_flower_does_not_start_without_a_password() -> None:
    from flower.command import is_flower_envvar

    own = services()["flower"]["environment"].keys() - services()["api-gpu"]["environment"].keys()
    assert own == {"FLOWER_BASIC_AUTH"} and is_flower_envvar("FLOWER_BASIC_AUTH")
    with pytest.raises(KeyError, match="FLOWER_BASIC_AUTH"):
        compose(FLOWER_BASIC_AUTH="")


@pytest.mark.parametrize("profiles", STARTED)
def test_what_a_service_names_is_there(profiles: list[str]) -> None:
    volumes = compose()["volumes"]
    started = services(profiles)
    for name, one in started.items():
        assert one.get("depends_on", {}).keys() <= started.keys(), name
        for mount in one.get("volumes", []):
            source = mount.partition(":")[0]
            assert source in volumes or (ROOT / source).is_file(), f"{name}: {source}"


def test_redis_cannot_evict_queues() -> None:
    lines = (ROOT / "infra" / "redis.conf").read_text().splitlines()
    options = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert options["maxmemory-policy"] not in EVICTING_POLICIES
    conf = services()["redis"]["volumes"][0].split(":")
    assert conf[1] == command(services()["redis"])[1]


def stages() -> dict[str, list[str]]:
    """The Dockerfile's stages and their instructions."""
    text = (ROOT / "infra" / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if stage := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[stage[2]] = list(found.get(stage[1], []))
            name = stage[2]
        elif line and not line.startswith("#"):
            found[name].append(line)
    return found


@pytest.mark.parametrize("name", [name for name, one in services().items() if "build" in one])
def test_the_image_is_built_from_a_stage_that_exists(name: str) -> None:
    service = services()[name]
    build = service["build"]
    assert (ROOT / build["dockerfile"]).is_file() and build["context"] == "."
    assert service["image"] == f"trivet:{build['target']}"
    assert build["target"] in stages()


@pytest.mark.parametrize("target", PROFILES)
def test_an_image_has_what_it_copies_and_does_not_run_as_root(target: str) -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert ignored[0] == "*" and all((ROOT / name).exists() for name in kept)
    for line in stages()[target]:
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert source == "." or any(fnmatch.fnmatch(source, f"{name}*") for name in kept), source
    assert [line for line in stages()[target] if line.startswith("USER")][-1:] == ["USER trivet"]


def test_docker_compose_takes_the_file() -> None:
    """The one real reader, where it is installed; it needs no engine for this."""
    if shutil.which("docker") is None:
        pytest.skip("no docker")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode:
        pytest.skip("docker has no compose plugin")
    for profiles in STARTED:
        chosen_ones = [word for one in profiles for word in ("--profile", one)]
        line = ["docker", "compose", *chosen_ones, "config", "--format", "json"]
        done = subprocess.run(line, cwd=ROOT, env=os.environ | REQUIRED, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["services"].keys() == services(profiles).keys()
