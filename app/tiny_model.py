"""A Qwen3-VL of about a million random parameters, for demos and tests: it loads in seconds and reads images and video.

Its answers are words without sense, but every token and pixel of the prompt has a part in them. So greedy output that
is equal in two topologies shows that the same prompt and the same picture reached the model in both.

usage: python -m app.tiny_model DIR
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from app.torchvision_ops import define

MAX_POSITIONS = 8192

# Chosen by looking at answers: a small change of the prompt changes them, few go round in circles, and most end by
# themselves within two hundred words.
_SEED = 2
_SPREAD = 0.2  # standard deviation of the layers' weights
_EMBEDDING_SPREAD = 0.08
_SHARPNESS = 4.0  # scale of the logits: the best token leads by more than rounding, and sampling prefers good ones
_UNSPOKEN = 0.1  # scale of the output rows of tokens that read badly: parts of words, single bytes, placeholders
_ENDING = 1.1  # scale of the end token's output row
_MARKER = "tiny_model.json"
_END = "<|im_end|>"
_PAD = "<|endoftext|>"
_IMAGE = "<|image_pad|>"
_VIDEO = "<|video_pad|>"
_VISION_START = "<|vision_start|>"
_VISION_END = "<|vision_end|>"
_SPECIAL = (_PAD, "<|im_start|>", _END, _VISION_START, _VISION_END, "<|vision_pad|>", _IMAGE, _VIDEO)

_CHAT_TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}\
{% if c.type == 'image' or 'image' in c or 'image_url' in c %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif c.type == 'video' or 'video' in c %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# What the tokenizer learns its words from.
_TEXT = """
What is in this image? What do you see in the picture? Describe the image in detail. Describe the video in detail.
Which colour is the circle? How many people are there? Where was this photo taken? Is the cat on the left or the right?
A red circle, a blue square, a green triangle, a yellow star, an orange line, a purple ring and a white cross on black.
The quick brown fox jumps over the lazy dog while an old man walks along the river with a small boat under the bridge.
Two children play with a ball near the house; behind them a tall tree, a garden, a road, some cars and a bicycle.
On the table stand a cup of coffee, a glass of water, a plate with bread, cheese, apples, grapes and a bowl of soup.
In the morning the sun rises over the mountain, the sky turns pink, birds sing, and the wind moves slowly through grass.
At night the city is quiet: bright windows, empty streets, a train far away, the moon above the sea and the stars.
First the camera shows a woman in a dark coat, then it turns to the door, and after a moment someone opens and smiles.
Yes, there is one. No, there are none. It looks like a large animal, perhaps a horse, a cow, a sheep or an elephant.
I think that this could be a painting of the market, because many people are buying fruit, flowers, fish and clothes.
You are a helpful assistant. Please answer in one short sentence. Hello! Thank you very much. Tell me a story about it.
The number of objects is three, four, five, six, seven, eight, nine or ten; the first and the last are almost as large.
Music plays, people talk and laugh, a phone rings, rain falls on the roof, and a voice says: time to go home, my friend.
"""


def build(directory: Path) -> Path:
    """Make the model in `directory` and return that path; one that is there already, whole and of this recipe, is kept.

    The files are the same bytes each time, for the same releases of torch, transformers and tokenizers. They are
    written beside `directory` and renamed, so that nobody sees half a model. Raises FileExistsError if the
    directory holds something else.
    """
    if _is_complete(directory):
        return directory
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARKER).is_file():
        raise FileExistsError(f"{directory} holds something other than a tiny model: choose another directory")
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        _write(fresh)
        _put_in_place(fresh, directory, scratch / "old")
    finally:
        shutil.rmtree(scratch)
    return directory


def _put_in_place(fresh: Path, directory: Path, old: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        directory.rename(old)
    try:
        fresh.rename(directory)
    except OSError:
        if not _is_complete(directory):  # another process may have been quicker, and its model is as good
            raise


def _recipe() -> str:
    """Names what the files follow from: this module and the releases of what writes them."""
    releases = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return hashlib.sha256(Path(__file__).read_bytes() + " ".join(releases).encode()).hexdigest()


def _is_complete(directory: Path) -> bool:
    try:
        marker = json.loads((directory / _MARKER).read_text())
        sizes = {name: (directory / name).stat().st_size for name in marker["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return bool(marker == {"recipe": _recipe(), "files": sizes})


def _write(directory: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    ids = {name: int(tokenizer.convert_tokens_to_ids(name)) for name in _SPECIAL}
    _write_weights(directory, _config(ids, len(tokenizer)), _output_scales(tokenizer.get_vocab()))
    _write_processors(directory)
    generation = {"eos_token_id": ids[_END], "pad_token_id": ids[_PAD], "do_sample": False}
    _write_json(directory / "generation_config.json", generation)
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    _write_json(directory / _MARKER, {"recipe": _recipe(), "files": files})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    )
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=MAX_POSITIONS,
        extra_special_tokens={
            "image_token": _IMAGE,
            "video_token": _VIDEO,
            "vision_bos_token": _VISION_START,
            "vision_eos_token": _VISION_END,
        },
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _config(ids: dict[str, int], tokens: int) -> Any:
    from transformers import Qwen3VLConfig

    text = {
        "vocab_size": (tokens + 63) // 64 * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "eos_token_id": ids[_END],
        "bos_token_id": ids[_PAD],
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[_IMAGE],
        video_token_id=ids[_VIDEO],
        vision_start_token_id=ids[_VISION_START],
        vision_end_token_id=ids[_VISION_END],
        tie_word_embeddings=False,  # tied and random, it would repeat its last word for ever
    )


def _output_scales(vocabulary: dict[str, int]) -> dict[int, float]:
    """The scale of each token's output row, where it isn't _UNSPOKEN."""
    space = "\u0120"  # the byte-level alphabet's sign for one
    spoken = {space + word for word in re.findall("[A-Za-z]+", _TEXT)} | set(",.?!")
    scales = {vocabulary[token]: 1.0 for token in sorted(spoken & vocabulary.keys())}
    return scales | {vocabulary[_END]: _ENDING}


def _write_weights(directory: Path, config: Any, output_scales: dict[int, float]) -> None:
    define()
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration(config).float()
    random = torch.Generator().manual_seed(_SEED)
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    scales = torch.full((config.text_config.vocab_size, 1), _UNSPOKEN)
    for token, scale in output_scales.items():
        scales[token] = scale
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, _EMBEDDING_SPREAD if weight in embeddings else _SPREAD, generator=random)
        model.get_output_embeddings().weight.mul_(scales * _SHARPNESS)
    model.save_pretrained(directory)


def _write_processors(directory: Path) -> None:
    pixels = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "processor_class": "Qwen3VLProcessor",
    }
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4096, "longest_edge": 262144},
    }
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 1048576},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 64,
        "cap_pixels_per_frame": False,
    }
    _write_json(directory / "preprocessor_config.json", pixels | image)
    _write_json(directory / "video_preprocessor_config.json", pixels | video)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    print(build(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
