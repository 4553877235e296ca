"""Adapter to vLLM: LoRA on CPUs, where its kernels take "no adapter" for the last one.

A token without an adapter has the index -1, which the kernels for GPUs pass over. Those for CPUs look it up: in a batch
with an adapter's requests, the model's own ran with whatever is, or was, in the last of `--max-loras` places. And they
change one row of logits for each request, which the rows of a prompt that is scored are not: with two requests in the
batch the engine died. A general plugin of vLLM's, since those run in its engine's process (see pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: All others are made of these.
KERNELS = ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink")

Kernel = Callable[..., None]


def install() -> None:
    """Mend the kernels of this process, where the engine computes on CPUs; once."""
    if is_sound():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in KERNELS:
        kernel = _for_adapters_alone(getattr(lora_ops, name))
        setattr(lora_ops, name, kernel)
        setattr(punica_cpu, name, kernel)
    wrapper: Any = punica_cpu.PunicaWrapperCPU
    wrapper.add_lora_linear = _where_any_has_one(wrapper.add_lora_linear)
    wrapper.add_lora_logits = _where_any_has_one(_of_answers_alone(wrapper.add_lora_logits))


def is_sound() -> bool:
    """Whether this process computes on something else, or is mended: vLLM reads its plugins when it reads its flags."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    from vllm.lora.ops.torch_ops import lora_ops

    return getattr(lora_ops.bgmv_shrink, "passes_over_none", False)


def _for_adapters_alone(kernel: Kernel) -> Kernel:
    def run(inputs: Any, weights: Any, output: Any, indices: Any, *more: Any, **named: Any) -> None:
        there = inputs.masked_fill((indices < 0).unsqueeze(1), 0)
        kernel(there, weights, output, indices, *more, **named)

    run.passes_over_none = True  # type: ignore[attr-defined]
    return run


def _where_any_has_one(change: Kernel) -> Kernel:
    """Most batches have no adapter, and vLLM would still make each layer's buffers."""

    def add(self: Any, *arguments: Any, **named: Any) -> None:
        if not (self.is_prefill and self.no_lora):
            change(self, *arguments, **named)

    return add


def _of_answers_alone(change: Kernel) -> Kernel:
    def add_lora_logits(self: Any, y: Any, x: Any, *more: Any, **named: Any) -> None:
        if x.numel() // x.shape[-1] != self.sampler_indices.shape[0]:
            # Of a prompt, and nothing says whose: its scores are without what an adapter changes of lm_head. Those of
            # a prompt with as many rows as the batch has answers cannot be told from them.
            return
        change(self, y, x, *more, **named)

    return add_lora_logits
