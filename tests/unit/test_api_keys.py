"""app.api_keys and the settings about keys: where they come from, and where they may not be seen."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app import api_keys, settings
from app.cli import api_client
from app.cli.main import app
from app.cli.up import _order
from app.launch import plan, readiness
from app.launch.errors import StartFailed
from app.launch.state import StateDirectory
from app.launch.supervisor import Supervisor
from app.settings import Settings, SettingsError, load

SECRET = "sk-5ecret"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [one for one in os.environ if one.startswith(settings.ENV_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("TRIVET_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def keys(**flags: Any) -> tuple[str, ...]:
    return api_keys.read(load(**flags).api)


def test_none_is_the_default() -> None:
    assert keys() == ()


def test_several_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_API__API_KEYS", "a, b,a ,,c=+/")
    assert keys() == ("a", "b", "c=+/")


def test_a_list_in_the_file_of_settings() -> None:
    Path("trivet.toml").write_text("[api]\napi_keys = ['a', 'b']\n")
    assert keys() == ("a", "b")


def test_a_file_of_keys_adds_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("keys").write_text("# ours\na\n\n  b   # Bob's\nc#d\r\na\n\t# end")
    monkeypatch.setenv("TRIVET_API__API_KEYS", "z")
    assert keys(api={"api_keys_file": "keys"}) == ("z", "a", "b", "c#d")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "nowhere: No such file"),
        (b"", "has no key in it"),
        (b"# later\n\n", "has no key in it"),
        (b"good\n" + SECRET.encode() + b" two words\n", "line 2: a key is printable"),
        ("ü".encode(), "line 1: a key is printable"),
        (b"a$b", "line 1: a key is printable ASCII without spaces, commas and $"),
        (b"\xff\xfe", "is no text"),
        (b"a" * 513, "line 1: a key is printable"),
    ],
)
def test_a_file_that_gives_no_keys_is_an_error_and_not_an_open_door(content: bytes | None, reason: str) -> None:
    if content is not None:
        Path("nowhere").write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        keys(api={"api_keys_file": "nowhere"})
    assert reason in str(caught.value) and "TRIVET_API__API_KEYS_FILE" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("value", [f"{SECRET}$x", f"{SECRET} x", f"{SECRET}\tx", f"{SECRET}ü", SECRET * 100])
def test_an_unusable_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRIVET_API__API_KEYS", value)
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value).startswith("api.api_keys")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("written", [f"api_key = '{SECRET}'", f"api_keys = [['{SECRET}']]"])
def test_nor_is_one_that_is_written_wrongly(written: str) -> None:
    Path("trivet.toml").write_text(f"[api]\n{written}\n")
    with pytest.raises(SettingsError) as caught:
        load()
    assert "api.a" in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize("flags", [("--json",), ()])
def test_trivet_config_masks_them(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    monkeypatch.setenv("TRIVET_API__API_KEYS", f"{SECRET},{SECRET}2")
    monkeypatch.setenv("TRIVET_API__ADMIN_KEY", f"{SECRET}-admin")
    answer = CliRunner().invoke(app, ["config", *flags])
    assert answer.exit_code == 0, answer.output
    assert "5ecret" not in answer.output and "***" in answer.output
    if flags:
        told = json.loads(answer.output)
        assert [told[path]["value"] for path in settings.SECRETS] == ["***", "***"]
        assert told["api.api_keys"]["source"] == "environment TRIVET_API__API_KEYS"


def test_trivet_config_says_that_none_is_set() -> None:
    told = json.loads(CliRunner().invoke(app, ["config", "--json"]).output)
    assert [bool(told[path]["value"]) for path in settings.SECRETS] == [False, False]


def with_keys(**changes: Any) -> Settings:
    return load(model="m", enable_multimodal=True, api={"api_keys": [SECRET, "other"]} | changes)


def test_no_way_of_writing_settings_down_shows_them(caplog: pytest.LogCaptureFixture) -> None:
    chosen = with_keys()
    logging.getLogger().warning("%s %r", chosen, chosen.api)
    texts = (repr(chosen), str(chosen), chosen.model_dump_json(), caplog.text, str(chosen.model_dump(mode="json")))
    assert not any("5ecret" in text for text in texts)


def test_children_of_an_up_other_than_the_api_have_no_keys(tmp_path: Path) -> None:
    chosen = with_keys(admin_key=f"{SECRET}-admin")
    shared = plan.child_environment(chosen, tmp_path)
    (engine,) = plan.engines(chosen, "agg", {"agg": 1}, [], "default")
    others = [plan.worker(engine, chosen, shared, 1, tmp_path), plan.flower(chosen, shared, tmp_path)]
    api = plan.api(chosen, shared, tmp_path, tmp_path)
    assert all("5ecret" not in f"{one.argv} {one.environment}" for one in others)
    assert "5ecret" not in f"{api.argv} {api.log}"
    assert api.environment["TRIVET_API__API_KEYS"] == f"{SECRET},other"
    assert api.environment["TRIVET_API__ADMIN_KEY"] == f"{SECRET}-admin"


def test_the_apis_process_loads_the_same_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = with_keys()
    shared = plan.child_environment(chosen, tmp_path)
    for name, value in plan.api(chosen, shared, tmp_path, tmp_path).environment.items():
        monkeypatch.setenv(name, value)
    assert keys() == (SECRET, "other")


def test_an_up_that_could_not_open_its_own_api_does_not_begin() -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        _order(with_keys(api_keys_file="nowhere"), "agg", None, "", "default", None)
    order = _order(with_keys(), "agg", None, "", "default", None)
    assert order.api_key == SECRET and SECRET not in repr(order)


@pytest.mark.parametrize("flags", [("--api-key", SECRET), (f"--api-key={SECRET}",), ("--api_key", SECRET)])
def test_a_key_in_the_command_line_is_refused(flags: tuple[str, ...]) -> None:
    answer = CliRunner().invoke(app, ["up", "--model", "m", *flags])
    assert answer.exit_code == 2
    assert "TRIVET_API__API_KEYS" in answer.output and SECRET not in answer.output


def test_the_file_of_keys_is_a_flag() -> None:
    Path("keys").write_text("a\n")
    told = json.loads(CliRunner().invoke(app, ["config", "--json", "--api-keys-file", "keys"]).output)
    assert (told["api.api_keys_file"]["value"], told["api.api_keys_file"]["source"]) == ("keys", "flag")


async def test_the_first_request_of_an_up_brings_the_key() -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers.get("Authorization")))
        if request.method == "POST" and seen[-1][1] != f"Bearer {SECRET}":
            return httpx.Response(401, json={"error": {"message": "who are you?"}})
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        await readiness.first_request(client, "http://api", "m", SECRET)
        assert seen == [("/health/ready", None), ("/v1/chat/completions", f"Bearer {SECRET}")]
        with pytest.raises(StartFailed, match="401.*who are you"):
            await readiness.first_request(client, "http://api", "m", None)


def test_trivet_chat_brings_our_own_key_to_our_own_api_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_client._key(None, "default") is None
    monkeypatch.setenv("TRIVET_API__API_KEYS", f"{SECRET},other")
    assert api_client._key(None, "default") == SECRET
    assert api_client._key("https://elsewhere.example", "default") is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-elsewhere")
    assert api_client._key("https://elsewhere.example", "default") == "sk-elsewhere"
    assert api_client._key(None, "default") == SECRET
    monkeypatch.delenv("TRIVET_API__API_KEYS")
    assert api_client._key(None, "default") == "sk-elsewhere"


def test_trivet_chat_takes_the_key_from_the_file_of_the_running_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("keys").write_text(f"{SECRET}\nother\n")
    directory = StateDirectory("blue")
    directory.make()
    chosen = with_keys(api_keys=[], api_keys_file="keys")
    supervisor = Supervisor(chosen, _order(chosen, "agg", None, "", "blue", None), directory, lambda _: None)
    directory.write(supervisor.state)
    assert SECRET not in (directory.path / "state.json").read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-elsewhere")
    assert api_client._key(None, "blue") == SECRET
    assert api_client._key(None, "default") == api_client._key("https://elsewhere.example", "blue") == "sk-elsewhere"
    (tmp_path / "keys").unlink()
    with pytest.raises(SettingsError, match="keys: No such file"):
        api_client._key(None, "blue")
    directory.write(supervisor.state.model_copy(update={"ticks": 1}))
    assert api_client._key(None, "blue") == "sk-elsewhere", "that one has ended"


@pytest.mark.parametrize(
    "given", ["https://a.example", "http://localhost:3000", "*", "chrome-extension://abc", "http://[::1]:3000"]
)
def test_origins(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("TRIVET_API__CORS_ORIGINS", f"{given}, https://other.example")
    assert load().api.cors_origins == (given, "https://other.example")


@pytest.mark.parametrize(
    "given", ["https://a.example/", "a.example", "https://a.example/chat", "HTTPS://A.example", "https://*?"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("TRIVET_API__CORS_ORIGINS", given)
    with pytest.raises(SettingsError, match=r"api.cors_origins \(TRIVET_API__CORS_ORIGINS\): .* is no origin"):
        load()
