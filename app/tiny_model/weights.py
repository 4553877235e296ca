"""Random weights, the same for the same recipe."""

from __future__ import annotations

from typing import Any

from app.tiny_model.family import Family
from app.torchvision_ops import define

_SPREAD = 0.2  # standard deviation of the layers' weights
_EMBEDDING_SPREAD = 0.08
_SHARPNESS = 4.0  # scale of the logits: the best token leads by more than rounding, and sampling prefers good ones


def random(family: Family, ids: dict[str, int], tokens: int, output_scales: list[float]) -> Any:
    """The family's model: small changes of a prompt change its answers, and few of them go round in circles."""
    define()
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(family.seed)  # of what is random and keeps the values that the model itself gave it
        model = family.model(ids, tokens).float()
    generator = torch.Generator().manual_seed(family.seed)
    output = model.get_output_embeddings().weight
    embeddings = {model.get_input_embeddings().weight, output}
    scales = torch.full((len(output), 1), min(output_scales))
    scales[: len(output_scales), 0] = torch.tensor(output_scales)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, _EMBEDDING_SPREAD if weight in embeddings else _SPREAD, generator=generator)
        output.mul_(scales * _SHARPNESS)
    return model
