"""app.torchvision_ops: in fresh interpreters, since an import of torchvision can't be undone."""

import subprocess
import sys
import textwrap

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def operators_cannot_load() -> None:
    plain = run("import torchvision")
    if plain.returncode == 0:
        pytest.skip("torchvision's compiled operators load on this machine")
    assert "operator torchvision::nms does not exist" in plain.stderr


def test_torchvision_imports_after_define_and_its_operators_say_why_they_do_not_run() -> None:
    done = run("""
        import sys
        from app.torchvision_ops import define
        define()
        define()
        assert "torchvision" not in sys.modules, "define() imported torchvision"
        import torch, torchvision
        from torchvision.transforms.v2 import functional
        assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
        define()
        if not torchvision.extension._has_ops():
            try:
                torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
            except RuntimeError as problem:
                print(problem)
        """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" or "Couldn't load custom C++ ops" in done.stdout


@pytest.mark.usefixtures("operators_cannot_load")
def test_the_fallback_is_logged_once_with_its_reason() -> None:
    done = run("""
        import logging
        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
        from app.torchvision_ops import define
        define()
        define()
        """)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("app.torchvision_ops torchvision's compiled operators cannot load (") == 1


def test_operators_that_are_there_stay_as_they_are() -> None:
    """A kernel registered before the call, as the compiled library's would be, is what still runs after it."""
    done = run("""
        import torch
        from app.torchvision_ops import define
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", schema)
            torch.library.impl(f"torchvision::{name}", "CPU", lambda dets, scores, iou_threshold: scores)
        define()
        print(torch.ops.torchvision.nms(torch.zeros(1, 4), torch.full((1,), 7.0), 0.5).item())
        """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "7.0"


def test_vllm_calls_it_before_it_imports_torchvision() -> None:
    """The module that vLLM runs to inspect models: nothing of ours is imported there before the plugin."""
    command = [sys.executable, "-c", "import vllm.model_executor.models.registry, torchvision"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
