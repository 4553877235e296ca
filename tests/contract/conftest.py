"""The API's serving layer, built once."""

from __future__ import annotations

from typing import Any

import pytest

from app import tiny_model
from app.settings import Settings
from tests.contract.serving import Pipeline


@pytest.fixture(scope="session")
def serving(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from api.vllm_serving import Serving

    model = tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")
    settings = Settings(
        model=str(model),
        served_model_name="tiny",
        enable_multimodal=True,
        engine={"args": "--max-model-len 2048 --dtype float32"},
    )
    made = Serving(settings, Pipeline())  # type: ignore[arg-type]
    yield made
    made.shutdown()


@pytest.fixture
def pipeline(serving: Any) -> Any:
    fresh = serving.client._pipeline
    fresh.__init__()
    return fresh
