"""vLLM's LoRA on CPUs: a batch's requests without an adapter are the model's own, whatever the others run with."""

from __future__ import annotations

from typing import Any

import pytest

RANK, INPUTS, OUTPUTS = 2, 4, 3
#: Of the requests' numbers in the engine: of adapters, and 0 for the model itself.
BATCH = (1, 0, 2, 0)
#: What every place for an adapter has in it; the last one was let go, and vLLM does not clear it.
PLACES = [1, 2, None]


@pytest.fixture
def punica(vllm: Any) -> Any:
    """What the engine computes with, for a batch of single tokens."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from workers import cpu_lora

    cpu_lora.install()
    cpu_lora.install()
    made = PunicaWrapperCPU(16, 8, "cpu")
    made.update_metadata(LoRAMapping(BATCH, BATCH, is_prefill=True), PLACES, len(PLACES) + 1, 100)
    return made


@pytest.fixture
def weights(torch: Any) -> tuple[Any, Any]:
    """The two factors of the adapter in each place, by which an input of ones becomes 8 times the place's number."""
    down = torch.ones(len(PLACES), 1, RANK, INPUTS)
    up = torch.ones(len(PLACES), 1, OUTPUTS, RANK)
    return down, up * torch.arange(1, len(PLACES) + 1).view(-1, 1, 1, 1)


#: What becomes of BATCH.
CHANGED = [8.0, 0.0, 16.0, 0.0]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_layers_change_what_has_an_adapter(punica: Any, torch: Any, weights: Any, is_prefill: bool) -> None:
    punica.is_prefill = is_prefill
    found, (down, up) = torch.zeros(len(BATCH), OUTPUTS), weights
    punica.add_lora_linear(found, torch.ones(len(BATCH), INPUTS), (down,), (up,), 1.0, (OUTPUTS,))
    assert found.tolist() == [[one] * OUTPUTS for one in CHANGED]


def test_embeddings_change_what_has_an_adapter(punica: Any, torch: Any, weights: Any) -> None:
    found = torch.zeros(len(BATCH), OUTPUTS)
    punica.add_lora_embedding(found, torch.full((len(BATCH), RANK), 4.0), weights[1])
    assert found.tolist() == [[one] * OUTPUTS for one in CHANGED]


def test_logits_change_where_a_request_has_an_adapter(punica: Any, torch: Any, weights: Any) -> None:
    found = torch.zeros(len(BATCH), OUTPUTS)
    punica.add_lora_logits(found, torch.ones(len(BATCH), INPUTS), *weights, 1.0)
    assert found.tolist() == [[one] * OUTPUTS for one in CHANGED]


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_logits_of_a_prompt_are_left_alone(punica: Any, torch: Any, weights: Any, rows: int) -> None:
    """One is scored in rows of its own, beside those of the batch."""
    found = torch.zeros(rows, OUTPUTS)
    punica.add_lora_logits(found, torch.ones(rows, INPUTS), *weights, 1.0)
    assert not found.any()


def test_nothing_is_computed_for_a_batch_without_adapters(punica: Any, torch: Any) -> None:
    from vllm.lora.layers import LoRAMapping

    punica.update_metadata(LoRAMapping((0, 0), (0, 0), is_prefill=True), PLACES, len(PLACES) + 1, 100)
    found = torch.zeros(2, OUTPUTS)
    punica.add_lora_linear(found, torch.ones(2, INPUTS), (None,), (None,), 1.0, (OUTPUTS,))
    punica.add_lora_logits(found, torch.ones(2, INPUTS), None, None, 1.0)
    assert not found.any()
