"""app.settings: sources, precedence, errors, and the environment handed to child processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app import settings
from app.roles import Role
from app.settings import Settings, SettingsError, environment, known, load, variable


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable, no file: defaults alone."""
    for name in list(os.environ):
        if name.startswith(settings.ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refusal(**flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(**flags)
    return str(caught.value)


def test_defaults_need_nothing() -> None:
    chosen = load()
    assert (chosen.api.port, chosen.redis.cache) == (8000, chosen.redis.broker_url)
    assert chosen == Settings()


def test_each_source_wins_over_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("trivet.toml").write_text("[api]\nport = 9001\nmax_in_flight = 7\nlease_s = 20.5\n")
    assert load().api.port == 9001
    monkeypatch.setenv("TRIVET_API__PORT", "9002")
    monkeypatch.setenv("TRIVET_API__LEASE_S", "30")
    assert load().api.port == 9002
    chosen = load(api={"port": 9003})
    assert (chosen.api.port, chosen.api.lease_s, chosen.api.max_in_flight) == (9003, 30.0, 7)
    assert chosen.api.host == "127.0.0.1"


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_API__PORT", "")
    assert load().api.port == 8000


def test_the_file_that_the_variable_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path("trivet.toml").write_text("model = 'not this one'\n")
    (tmp_path / "other.toml").write_text("model = 'a'\n[worker]\nroles = ['prefill', 'decode']\n")
    monkeypatch.setenv("TRIVET_CONFIG", str(tmp_path / "other.toml"))
    chosen = load()
    assert (chosen.model, set(chosen.roles)) == ("a", {Role.PREFILL, Role.DECODE})


def test_a_named_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_CONFIG", "nowhere.toml")
    assert refusal() == "TRIVET_CONFIG=nowhere.toml: no such file"


def test_a_file_that_is_no_toml() -> None:
    Path("trivet.toml").write_text("[api\nport=1")
    assert "trivet.toml" in refusal()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("TRIVET_API__PORT", "0", "greater than or equal to 1"),
        ("TRIVET_API__PORT", "http", "valid integer"),
        ("TRIVET_LOG_LEVEL", "LOUD", "DEBUG|INFO|WARNING|ERROR"),
        ("TRIVET_REDIS__BROKER_URL", "amqp://host", "redis://, rediss://, valkey:// or unix://"),
        ("TRIVET_REDIS__TIMEOUT_S", "inf", "finite number"),
        ("TRIVET_REDIS__TIMEOUT_S", "nan", "number"),
        ("TRIVET_WORKER__ROLES", "prefill,dance", "'encode', 'prefill' or 'decode'"),
        ("TRIVET_WORKER__ROLES", " , ", "at least one of encode, prefill, decode"),
        ("TRIVET_ENABLE_MULTIMODAL", "perhaps", "valid boolean"),
        ("TRIVET_MEDIA__MAX_ITEMS", "1.5", "valid integer"),
    ],
)
def test_a_wrong_value_names_the_setting_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    said = refusal()
    path = name.removeprefix("TRIVET_").lower().replace("__", ".")
    assert said.startswith(f"{path} ({name}): ") and said.count("\n") == 0
    assert allowed in said


def test_every_wrong_setting_has_its_line() -> None:
    lines = refusal(api={"port": -1, "lease_s": 0}, model=5).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["model", "api.port", "api.lease_s"]


def test_a_password_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_REDIS__BROKER_URL", "http://user:secret@host:6379")
    said = refusal()
    assert "secret" not in said and "host:6379" in said


def test_a_lease_that_heartbeats_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_WORKER__HEARTBEAT_S", "4")
    assert "worker.lease_s (TRIVET_WORKER__LEASE_S): must be at least twice worker.heartbeat_s (4)" in refusal()
    assert load(worker={"lease_s": 8}).worker.lease_s == 8


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_API__PROT", "9000")
    monkeypatch.setenv("TRIVET_MODLE", "x")
    assert "TRIVET_API__PROT, TRIVET_MODLE" in refusal()


def test_an_unknown_name_in_the_file_is_refused() -> None:
    Path("trivet.toml").write_text("[api]\nprot = 1\n")
    assert refusal().startswith("api.prot ")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("valkey://a:1/2", "redis://a:1/2"),
        ("valkeys://a:1/2", "rediss://a:1/2"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_valkey_is_redis(given: str, used: str) -> None:
    chosen = load(redis={"broker_url": given, "cache_url": given})
    assert (chosen.redis.broker_url, chosen.redis.cache) == (used, used)


def test_roles_follow_the_media_switch() -> None:
    assert load().roles == {Role.PREFILL, Role.DECODE}
    assert load(enable_multimodal=True).roles == set(Role)
    assert load(enable_multimodal=True, worker={"roles": "decode, encode"}).roles == {Role.DECODE, Role.ENCODE}


def test_the_served_name_is_the_models_unless_given() -> None:
    assert load(model="a/b").served_name == "a/b"
    assert load(model="a/b", served_model_name="c").served_name == "c"


CHANGED: dict[str, Any] = {
    "model": "/models/with a space/and 'quotes'",
    "served_model_name": "ünïcode, comma=equals",
    "enable_multimodal": True,
    "log_level": "DEBUG",
    "redis": {"broker_url": "redis://:p%40ss@host:1/3", "timeout_s": 0.25, "wait": True},
    "engine": {
        "args": "--hf-overrides '{\"a\": [1, 2]}' --dtype float32",
        "decode_args": '{"kv_role": "x"}',
        "kv_lease_s": 1e3,
    },
    "worker": {"roles": "decode,prefill", "gpu": "0,1", "concurrency": 3},
    "api": {"port": 1, "request_timeout_s": 1e-3},
    "flower": {"enabled": False},
}


def read_back(variables: dict[str, str], folder: Path) -> dict[str, Any]:
    """What a child process with these variables loads."""
    code = "import app.settings as s; print(s.load().model_dump_json())"
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    path = os.pathsep.join([str(Path(settings.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **variables, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def dumped(chosen: Settings) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(chosen.model_dump_json())
    return shown


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Path -> value, where the order of what is a set doesn't count."""
    return {path: sorted(one) if isinstance(one, list) else one for path, one in settings.leaves(tree).items()}


def test_a_child_process_has_the_same_settings(tmp_path: Path) -> None:
    chosen = load(**CHANGED)
    variables = environment(chosen)
    assert variables["TRIVET_WORKER__ROLES"] == "decode,prefill"
    assert variables["TRIVET_FLOWER__ENABLED"] == "false"
    assert "TRIVET_API__HOST" not in variables, "what is as by default needs no variable"
    assert flat(read_back(variables, tmp_path)) == flat(dumped(chosen))


def test_with_everything_a_file_of_the_childs_changes_nothing(tmp_path: Path) -> None:
    chosen = Settings(model="m")
    (tmp_path / "trivet.toml").write_text("enable_multimodal = true\n[api]\nport = 9001\n[flower]\nenabled = false\n")
    read = read_back(environment(chosen, everything=True), tmp_path)
    assert (read["api"]["port"], read["enable_multimodal"], read["flower"]["enabled"]) == (8000, False, True)
    assert read_back(environment(chosen), tmp_path)["api"]["port"] == 9001, "the file must have been read"


def leaves_of(tree: dict[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, value in tree.items():
        paths += leaves_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return paths


def test_known_lists_every_leaf_with_its_meaning() -> None:
    assert list(known()) == leaves_of(dumped(Settings()))
    assert [path for path, meaning in known().items() if not meaning.endswith((".", ")"))] == []


def test_variables_are_names_that_a_shell_takes() -> None:
    assert variable("api.max_in_flight") == "TRIVET_API__MAX_IN_FLIGHT"
    assert all(variable(path).replace("_", "").isalnum() for path in known())


def test_current_is_read_once_until_flags_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", [])
    monkeypatch.setenv("TRIVET_MODEL", "first")
    assert settings.current().model == "first"
    monkeypatch.setenv("TRIVET_MODEL", "second")
    assert settings.current().model == "first"
    settings.use(load(model="third"))
    assert settings.current().model == "third"
