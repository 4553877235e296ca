"""The tokenizer: words of everyday English, single bytes, and the family's special tokens."""

from __future__ import annotations

import re
from typing import Any

from app.tiny_model.family import MAX_POSITIONS, Family

_UNSPOKEN = 0.1  # scale of the output rows of tokens that read badly: parts of words, single bytes, placeholders
_ENDING = 1.1  # scale of the end token's output row

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

# %s: what stands for a part. Audio is numbered, as the families that take it do.
_TEMPLATE = """{%%- set count = namespace(audio=0) %%}{%%- for m in messages %%}<|im_start|>{{ m.role }}
{%% if m.content is string %%}{{ m.content }}{%% else %%}{%% for c in m.content %%}\
%s{%% endif %%}{%% endfor %%}{%% endif %%}<|im_end|>
{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant
{%% endif %%}"""


def tokenizer(family: Family) -> Any:
    """A transformers tokenizer with the family's chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    )
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in family.special])
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token=family.end,
        pad_token=family.pad,
        model_max_length=MAX_POSITIONS,
        extra_special_tokens=dict(family.named),
    )
    made.chat_template = _TEMPLATE % _parts(family)
    return made


def output_scales(vocabulary: dict[str, int], family: Family) -> list[float]:
    """The scale of each token's output row, by token id."""
    space = "\u0120"  # the byte-level alphabet's sign for one
    spoken = {space + word for word in re.findall("[A-Za-z]+", _TEXT)} | set(",.?!")
    scales = [_UNSPOKEN] * len(vocabulary)
    for token in spoken & vocabulary.keys():
        scales[vocabulary[token]] = 1.0
    scales[vocabulary[family.end]] = _ENDING
    return scales


def _parts(family: Family) -> str:
    parts = {**family.parts, "'text' in c": "{{ c.text }}"}
    words = ("elif" if at else "if" for at in range(len(parts)))
    return "".join(
        f"{{% {word} {condition} %}}{text}" for word, (condition, text) in zip(words, parts.items(), strict=True)
    )
