"""Adapter to vLLM: the tokens that stand for media in a model's prompts, and that a client's text must not bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from app.errors.requests import InvalidRequest
from app.messages.media import MediaRef, Modality


class Markers:
    """Refuses prompts with more of these tokens than they have media.

    A worker puts a medium in the place of the first marker that it finds, so one that came as text would get the
    picture of another place, and leave a marker without one to the engine.
    """

    def __init__(self, model_config: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found = [
            (token, modality, _in_placeholder(model_config, tokenizer, modality, token))
            for modality, token in _tokens(model_config.hf_config)
        ]

    def check(self, token_ids: Sequence[int], media: Sequence[MediaRef]) -> None:
        """Raises InvalidRequest, which shows the marker."""
        for token, modality, each in self._found:
            allowed = each * sum(ref.modality == modality for ref in media)
            if token_ids.count(token) > allowed:
                text = self._tokenizer.convert_ids_to_tokens(token)
                raise InvalidRequest(
                    f"the text has {text}, which stands for {'an' if modality[0] in 'ai' else 'a'} {modality} in this "
                    "model's prompts; send media as content parts"
                )


def _tokens(hf_config: Any) -> Iterator[tuple[Modality, int]]:
    """By the names that models' configurations have for them; those of omni models are in their thinker's part."""
    seen = set()
    for part in (hf_config, getattr(hf_config, "thinker_config", None)):
        for modality in get_args(Modality):
            for name in (f"{modality}_token_id", f"{modality}_token_index"):
                token = getattr(part, name, None)
                if isinstance(token, int) and token not in seen:
                    seen.add(token)
                    yield modality, token


def _in_placeholder(model_config: Any, tokenizer: Any, modality: Modality, token: int) -> int:
    """How many of them vLLM writes for one item."""
    from vllm.model_executor.model_loader import get_model_cls

    try:
        text = get_model_cls(model_config).get_placeholder_str(modality, 1)
    except (ValueError, AttributeError):
        text = None
    written: list[int] = tokenizer.encode(text or "", add_special_tokens=False)
    return max(1, written.count(token))
