"""Flags of `trivet up`: what becomes a setting, what is vLLM's, and what `trivet config` tells of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.cli import engine_flags
from app.cli.main import app


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("TRIVET_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRIVET_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def told(*arguments: str) -> dict[str, Any]:
    """What `trivet config` says of these flags."""
    answer = CliRunner().invoke(app, ["config", "--json", *arguments])
    assert answer.exit_code == 0, answer.output
    return dict(json.loads(answer.output))


def test_flags_of_one_role_are_told_from_those_of_all() -> None:
    given = ["--max-model-len", "4096", "--prefill.max-num-seqs", "8", "--decode.max-num-seqs=64", "--dtype", "float32"]
    assert engine_flags.split(given) == {
        "args": "--max-model-len 4096 --dtype float32",
        "prefill_args": "--max-num-seqs 8",
        "decode_args": "--max-num-seqs=64",
    }


def test_values_survive_a_shell() -> None:
    given = ["--limit-mm-per-prompt", '{"image": 4}', "--seed", "-1", "-O3", "--encode.hf-overrides", "it's"]
    found = engine_flags.split(given)
    assert found["args"] == """--limit-mm-per-prompt '{"image": 4}' --seed -1 -O3"""
    assert found["encode_args"] == """--hf-overrides 'it'"'"'s'"""


def test_flags_with_several_values_and_dots_of_vllms_own() -> None:
    found = engine_flags.split(["--decode.lora-modules", "a=b", "c=d", "--compilation-config.level", "3"])
    assert found == {"decode_args": "--lora-modules a=b c=d", "args": "--compilation-config.level 3"}


def test_a_word_without_a_flag_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'agg'"):
        engine_flags.split(["agg", "--max-model-len", "1"])


def test_vllms_flags_on_media_urls_are_the_apis() -> None:
    found = told("--allowed-media-domains", "b.example,*.a.example", "--allowed-local-media-path", "/data")
    assert found["media_urls.allowed_media_domains"]["value"] == "*.a.example,b.example"
    assert found["media_urls.allowed_local_media_path"]["value"] == "/data"
    assert found["engine.args"]["value"] == ""


def test_a_proxys_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_MEDIA_URLS__PROXY_URL", "http://ada:secret@proxy:3128")
    assert told()["media_urls.proxy_url"]["value"] == "http://ada:***@proxy:3128"


def test_unknown_flags_become_engine_arguments_and_known_ones_settings() -> None:
    found = told(
        "--model", "m", "--api-port", "9000", "--no-flower", "--max-model-len", "4096", "--decode.dtype", "half"
    )
    assert found["model"] == {"path": "model", "value": "m", "source": "flag", "meaning": found["model"]["meaning"]}
    assert (found["api.port"]["value"], found["api.port"]["source"]) == (9000, "flag")
    assert (found["flower.enabled"]["value"], found["flower.enabled"]["source"]) == (False, "flag")
    assert (found["engine.args"]["value"], found["engine.args"]["source"]) == ("--max-model-len 4096", "flag")
    assert found["engine.decode_args"]["value"] == "--dtype half"
    assert (found["engine.prefill_args"]["value"], found["engine.prefill_args"]["source"]) == ("", "default")


def test_flags_of_vllms_front_end_are_settings_of_the_api() -> None:
    found = told("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--no-enable-auto-tool-choice")
    assert found["api.tool_call_parser"]["value"] == "hermes"
    assert found["api.reasoning_parser"]["value"] == "qwen3"
    assert found["api.enable_auto_tool_choice"]["value"] is False
    assert found["engine.args"]["value"] == ""


def test_engine_flags_come_after_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_ENGINE__ARGS", "--dtype half --max-model-len 1")
    assert told("--max-model-len", "2")["engine.args"]["value"] == "--dtype half --max-model-len 1 --max-model-len 2"


def test_config_names_each_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trivet.toml").write_text(
        'model = "from-file"\n[api]\nport = 1111\nhost = "0.0.0.0"\n[media]\nmax_items = 3\n'
    )
    monkeypatch.setenv("TRIVET_API__PORT", "2222")
    monkeypatch.setenv("TRIVET_WORKER__ROLES", "prefill,decode")
    monkeypatch.setenv("TRIVET_REDIS__BROKER_URL", "redis://me:secret@host/0")
    found = told("--host", "::1")
    sources = {path: (row["value"], row["source"]) for path, row in found.items()}
    assert sources["api.host"] == ("::1", "flag")
    assert sources["api.port"] == (2222, "environment TRIVET_API__PORT")
    assert sources["media.max_items"] == (3, "trivet.toml")
    assert sources["model"] == ("from-file", "trivet.toml")
    assert sources["flower.port"] == (5555, "default")
    assert sources["worker.roles"] == ("decode,prefill", "environment TRIVET_WORKER__ROLES")
    assert sources["redis.broker_url"] == ("redis://me:***@host/0", "environment TRIVET_REDIS__BROKER_URL")
    assert all(row["meaning"] for row in found.values())


def test_the_table_hides_secrets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_REDIS__CACHE_URL", "redis://:secret@host/0")
    answer = CliRunner().invoke(app, ["config"])
    assert "redis://:***@host/0" in answer.output
    assert "secret" not in answer.output
    assert "environment TRIVET_REDIS__CACHE_URL" in answer.output


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "which model?"),
        (("--model", "./missing"), "--model ./missing: no such file"),
        (("--model", "m", "--replicas", "decode=2"), "--replicas decode=2"),
        (("--model", "m", "--name", "a/b"), "--name 'a/b'"),
        (("--model", "m", "--api-port", "99999"), "api.port (TRIVET_API__PORT)"),
        (("--model", "m", "--redis-url", "amqp://x"), "redis.broker_url (TRIVET_REDIS__BROKER_URL)"),
        (("--model", "m", "--gpus", "0", "-tp", "2"), "needs 2 GPUs"),
    ],
)
def test_what_cannot_be_started_is_one_line_on_stderr(flags: tuple[str, ...], reason: str) -> None:
    answer = trivet("up", "--no-flower", *flags)
    assert answer.returncode == 1
    assert answer.stderr.startswith("trivet: ")
    assert reason in answer.stderr
    assert "Traceback" not in answer.stderr


def test_help_is_quick_and_imports_no_engine() -> None:
    began = time.monotonic()
    answer = trivet("--help")
    assert time.monotonic() - began < 5  # a second at rest; importing vLLM takes ten
    for command in ("up", "down", "status", "chat", "config", "version"):
        assert command in answer.stdout
    code = (
        "import sys, app.cli.main, app.launch.supervisor; print({'vllm', 'torch', 'transformers'} & set(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout == "set()\n"


def test_version_names_what_is_installed() -> None:
    answer = CliRunner().invoke(app, ["version"])
    assert answer.exit_code == 0
    assert {"trivet", "celery", "python"} <= {line.split()[0] for line in answer.output.splitlines()}


def trivet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
