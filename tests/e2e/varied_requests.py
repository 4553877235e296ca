"""Requests of all kinds that have one right answer: greedy, seeded, or held to a form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.e2e.prompts import image, picture, user, video

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
QUESTION = user("What is in the garden behind the house?")
STORY = user("Tell me a story about the sea and the moon. " * 4)
TALK = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Yes, there is one."},
    {"role": "user", "content": "Which colour is the circle?"},
]
#: No blanks: JSON may have them between any two signs, and a random model likes them without end.
TIGHT: dict[str, Any] = {"logit_bias": {"197": -100, "198": -100, "201": -100, "220": -100}, **GREEDY}
#: The tiny model's special tokens, the third of which ends an answer.
SPECIAL = [*range(791, 799)]
#: Every value is one of a few: a random model would make a free string as long as it may.
FORM = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": FORM, "strict": True}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": one} for one in (FUNCTION, CLOCK)]
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": FORM, "strict": True}}
GRAMMAR = 'root ::= "SELECT " column " FROM " table\ncolumn ::= "a" | "b"\ntable ::= "t" [1-9]'
TAGS = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "x{2}"}, "end": "</a>"},
}


@dataclass(frozen=True)
class Ask:
    """A request without its model."""

    path: str
    body: dict[str, Any] = field(hash=False)


def chat(messages: Any = QUESTION, tokens: int = 16, **more: Any) -> Ask:
    return Ask(CHAT, {"messages": messages, "max_tokens": tokens, **more})


def completion(prompt: Any = "Two children play", tokens: int = 16, **more: Any) -> Ask:
    return Ask(COMPLETIONS, {"prompt": prompt, "max_tokens": tokens, **more})


def response(given: Any = "What is in the garden?", tokens: int = 16, **more: Any) -> Ask:
    return Ask(RESPONSES, {"input": given, "max_output_tokens": tokens, **GREEDY, **more})


def message(content: Any = "What is in the garden?", tokens: int = 16, **more: Any) -> Ask:
    return Ask(MESSAGES, {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, **GREEDY, **more})


def _outputs(**form: Any) -> dict[str, Any]:
    return {"structured_outputs": form, "max_tokens": 60, **GREEDY}


_BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": picture(51).partition(",")[2]},
}
_PARTS = [{"type": "input_image", "image_url": picture(51), "detail": "auto"}, {"type": "input_text", "text": "?"}]

CHATS = {
    "greedy": chat(**GREEDY),
    "greedy, streamed": chat(**GREEDY, stream=True),
    "greedy, streamed with usage": chat(**GREEDY, **STREAM),
    "usage in every chunk": chat(
        **GREEDY, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "talk": chat(TALK, **GREEDY, max_completion_tokens=9),
    "to the end": chat(tokens=200, **GREEDY),
    "seeded": chat(STORY, **SEEDED),
    "seeded, streamed": chat(**SEEDED, **STREAM),
    "seeded, of the likely": chat(TALK, **{**SEEDED, "temperature": 1.5}, top_p=0.8, top_k=20, min_p=0.01),
    "three choices": chat(STORY, **SEEDED, n=3),
    "three choices, streamed": chat(**SEEDED, n=3, **STREAM),
    "logprobs": chat(TALK, **GREEDY, logprobs=True, top_logprobs=3),
    "logprobs of two choices": chat(STORY, **SEEDED, logprobs=True, top_logprobs=2, n=2),
    "logprobs, streamed": chat(**GREEDY, logprobs=True, top_logprobs=2, **STREAM),
    "logprobs of no others": chat(**GREEDY, logprobs=True, return_tokens_as_token_ids=True),
    "logprobs of the prompt": chat(**GREEDY, prompt_logprobs=1),
    "token ids": chat(**GREEDY, return_token_ids=True),
    "token ids, streamed": chat(**GREEDY, return_token_ids=True, **STREAM),
    "stop strings": chat(TALK, **GREEDY, tokens=60, stop=[" th", ".", "?!"]),
    "stop string, streamed": chat(**GREEDY, tokens=60, stop=[" th", "."], **STREAM),
    "stop string, kept": chat(**GREEDY, tokens=60, stop=[" th", "."], include_stop_str_in_output=True),
    "stop tokens": chat(**GREEDY, tokens=60, stop_token_ids=[*range(300, 800, 3)]),
    "at least so long": chat(**GREEDY, tokens=30, min_tokens=10, stop_token_ids=[*range(300, 800, 3)]),
    "past the end": chat(**GREEDY, tokens=8, ignore_eos=True, allowed_token_ids=SPECIAL, skip_special_tokens=False),
    "bias": chat(**GREEDY, logit_bias={"400": 100, "401": -100}),
    "penalties": chat(STORY, **GREEDY, tokens=40, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.2),
    "words not to say": chat(**GREEDY, bad_words=[" the", " a", " garden"]),
    "tokens to say": chat(**SEEDED, allowed_token_ids=[*range(300, 340)]),
    "the end at once": chat(**GREEDY, allowed_token_ids=SPECIAL[2:3]),
    "echo": chat(TALK[:3], **GREEDY, echo=True, add_generation_prompt=False, continue_final_message=True),
    "template": chat(TALK, **GREEDY, chat_template_kwargs={"of": "nothing"}, documents=None, priority=3, user="u"),
    "schema": chat(**TIGHT, tokens=60, response_format=JSON_SCHEMA),
    "schema, streamed": chat(**SEEDED, tokens=60, response_format=JSON_SCHEMA, **STREAM),
    "any object": chat(STORY, **TIGHT, tokens=30, response_format={"type": "json_object"}),
    "regex": chat(**_outputs(regex=r"(red|blue) [0-9]{3}!")),
    "choice": chat(**_outputs(choice=["a red circle", "a blue square"])),
    "grammar": chat(**_outputs(grammar=GRAMMAR)),
    "structural tag": chat(**GREEDY, response_format=TAGS),
    "a tool, if it likes": chat(**GREEDY, tools=TOOLS),
    "a tool, which must be": chat(**TIGHT, tokens=80, tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
    # Of calls until their length is used up vLLM's stream has more or less, by how the last tokens come.
    "tools, streamed": chat(
        STORY, **TIGHT, tokens=80, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **STREAM
    ),
    "a named tool": chat(**TIGHT, tokens=80, tools=TOOLS, tool_choice=NAMED),
    "a named tool, streamed": chat(STORY, **TIGHT, tokens=80, tools=TOOLS, tool_choice=NAMED, **STREAM),
    "a call that is cut short": chat(**GREEDY, tokens=40, tools=TOOLS, tool_choice=NAMED, **STREAM),
    "a tool's answer": chat(
        [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **NAMED, "function": {
                "name": "weather", "arguments": '{"city": "Oslo"}'}}]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ], **GREEDY, tools=TOOLS, tool_choice="none",
    ),
    "picture": chat(user(image(51), "What is in this image?"), **GREEDY, logprobs=True),
    "pictures, streamed": chat(user("First", image(52), "then", image(53, (64, 160)), "?"), **SEEDED, **STREAM),
    "video": chat(user(video(54), "What happens?"), **GREEDY),
}  # fmt: skip

OTHERS = {
    "completion": completion(**GREEDY),
    "completion of tokens": completion([300, 310, 320], **SEEDED, logprobs=2),
    "completions, streamed": completion(["Describe the image", "Tell me a story"], **GREEDY, **STREAM),
    "completions of choices": completion(["Hello", "Music"], **SEEDED, n=2),
    "echo of a completion": completion(**GREEDY, echo=True, logprobs=1, tokens=4),
    "nothing but echo": completion(**GREEDY, echo=True, tokens=0),
    "scores of a prompt": completion(**GREEDY, prompt_logprobs=2, tokens=2),
    "logprobs of a completion, streamed": completion(**GREEDY, logprobs=3, **STREAM),
    "stop of a completion": completion(**GREEDY, tokens=60, stop=[" th"], return_token_ids=True),
    "schema of a completion": completion(**TIGHT, tokens=60, response_format=JSON_SCHEMA),
    "response": response(),
    "response, streamed": response(stream=True),
    "response to a talk": response([*TALK[:2], TALK[3]], instructions="Be brief.", tokens=9),
    "response in a form": response(
        tokens=60, **TIGHT, text={"format": {"type": "json_schema", "name": "it", "schema": FORM, "strict": True}}
    ),
    "response with a call": response(
        tokens=80, **TIGHT, tools=[{"type": "function", **FUNCTION}], tool_choice="required", parallel_tool_calls=False
    ),
    "response with a call, streamed": response(
        tokens=80,
        **TIGHT,
        tools=[{"type": "function", **FUNCTION}],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    ),
    "response with logprobs": response(include=["message.output_text.logprobs"], top_logprobs=2),
    "response to a picture": response([{"role": "user", "content": _PARTS}]),
    "message": message(),
    "message, streamed": message(stream=True),
    "message with a stop": message(tokens=60, stop_sequences=[" th"], system="Be brief.", stream=True),
    "message in a form": message(tokens=60, output_config={"format": {"type": "json_schema", "schema": FORM}}),
    "message with a call": message(
        tokens=120, tools=[{"name": "weather", "input_schema": FORM, "strict": True}], tool_choice={"type": "any"}
    ),
    "message to a picture": message([_BLOCK, {"type": "text", "text": "?"}]),
    "tokens of a message": Ask(f"{MESSAGES}/count_tokens", {"messages": QUESTION}),
    "tokens": Ask("/tokenize", {"prompt": "What is 👩‍🚀\x00 in\n\nthe garden?", "return_token_strs": True}),
    "tokens of a talk": Ask("/tokenize", {"messages": TALK}),
    "text of tokens": Ask("/detokenize", {"tokens": [300, 2, 310, 0, 77]}),
}

REQUESTS = CHATS | OTHERS
