"""Conversations as tokens, in the styles of several families of chat templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hwrl.errors import DataError
from hwrl.interfaces import Response
from hwrl.rollout import ChatTokens
from tests.support.chat_models import STYLES, Style

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "1 + 1?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def response(chat: ChatTokens, text: str, *, truncated: bool = False, stop: str | None = None) -> Response:
    ids = chat.encode(text)
    return Response(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), truncated, stop)


def text_of(chat: ChatTokens, ids: Any) -> str:
    return chat.decode(ids, special=True)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("answer", ["It is 2.", "call"])
def test_a_conversation_that_grows_is_the_templates_text(style: Style, answer: str) -> None:
    """The policy's words in the template's own form, so both ways must agree, token by token."""
    chat = style.chat()
    if answer == "call":
        said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        new = {"role": "tool", "content": "2", "tool_call_id": "1"}
    else:
        said, new = {"role": "assistant", "content": answer}, {"role": "user", "content": "And 2 + 2?"}
    whole = text_of(chat, chat.prompt([USER, said, new]))
    first = chat.prompt([USER])
    begun = text_of(chat, chat.prompt([USER, said]))
    end = max(begun.rfind(end) + len(end) for end in style.ends if end in begun)
    spoken = chat.encode(begun[len(text_of(chat, first)) : end])
    rest = chat.following([USER, said, new], at=1, said=spoken)
    assert text_of(chat, np.concatenate([first, spoken, rest])) == whole
    assert np.concatenate([first, spoken, rest]).tolist() == chat.prompt([USER, said, new]).tolist()


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_the_template_ends_a_turn_that_the_policy_did_not_end(style: Style) -> None:
    chat = style.chat()
    messages = [USER, {"role": "assistant", "content": "It"}, {"role": "user", "content": "Go on"}]
    ended = chat.following(messages, at=1, said=chat.encode("It" + style.ends[0]))
    cut = chat.following(messages, at=1, said=chat.encode("It"))
    added = text_of(chat, cut).removesuffix(text_of(chat, ended))
    assert added.strip() == style.ends[0] and "Go on" in text_of(chat, ended)


def test_another_end_token_than_the_templates_stays_alone() -> None:
    chat = STYLES["headers"].chat()
    messages: Any = [
        USER,
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
    ]
    rest = chat.following(messages, at=1, said=chat.encode("x<|eom|>"))
    assert text_of(chat, rest).startswith("<|header|>ipython")


def test_reasoning_that_the_template_would_drop_stays() -> None:
    chat = STYLES["chatml"].chat()
    messages = [USER, {"role": "assistant", "content": "<think>hm</think>2"}, {"role": "user", "content": "Why?"}]
    assert "hm" not in text_of(chat, chat.prompt(messages))
    spoken = chat.encode("<think>hm</think>2<|im_end|>")
    rest = text_of(chat, chat.following(messages, at=1, said=spoken))
    assert rest == "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_words_like_the_mark_confuse_nothing() -> None:
    chat = STYLES["chatml"].chat()
    user, said = (
        {"role": "user", "content": "THE POLICY SAID THIS"},
        {"role": "assistant", "content": "<think>h</think>2"},
    )
    rest = chat.following([user, said, user], at=1, said=chat.encode("<think>h</think>2<|im_end|>"))
    assert text_of(chat, rest).count("THE POLICY SAID THIS") == 1


def test_a_template_that_hides_the_end_of_a_message_is_refused() -> None:
    template = (
        "{% for message in messages %}{{ message.role }}{% if loop.last %}{{ message.content }}{% endif %}{% endfor %}"
    )
    chat = Style(template, ("<end>",), ("<end>",)).chat()
    with pytest.raises(DataError, match="does not say where"):
        chat.following([USER, {"role": "assistant", "content": "2"}, USER], at=1, said=chat.encode("2"))


def test_a_refusal_of_the_template_names_its_reason() -> None:
    chat = STYLES["instruct"].chat()
    with pytest.raises(DataError, match="only user, assistant and tool"):
        chat.prompt([{"role": "system", "content": "Be brief."}])


def test_content_in_parts_and_the_new_name_of_the_system() -> None:
    chat = STYLES["chatml"].chat()
    parts = [{"type": "text", "text": "1 +"}, {"type": "text", "text": "1?"}]
    given = chat.prompt([{"role": "developer", "content": "Add."}, {"role": "user", "content": parts, "name": None}])
    assert "system\nAdd.<|im_end|>\n<|im_start|>user\n1 +\n1?<|im_end|>" in text_of(chat, given)


def test_the_policys_text_has_no_end_no_stop_text_and_no_special_tokens() -> None:
    chat = STYLES["chatml"].chat()
    assert chat.text(response(chat, "2<|im_start|><|im_end|>")) == "2"
    assert chat.text(response(chat, "2 Obs: 3", stop="Obs:")) == "2 "
    assert chat.text(response(chat, "2<|im_start|>", stop="|"), special=True) == "2<", "a token has it twice"
    assert chat.text(response(chat, "2<|im_start|>", truncated=True), special=True) == "2<|im_start|>"


def test_calls_are_read_if_there_are_tools() -> None:
    chat = STYLES["chatml"].chat()
    text = 'Hm.<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call>"}}\n</tool_call><|im_end|>'
    with_tools, without = chat.read(response(chat, text), tools=TOOLS), chat.read(response(chat, text))
    assert with_tools.content == "Hm." and [call.name for call in with_tools.tool_calls] == ["add"]
    assert without.content == text.removesuffix("<|im_end|>") and not without.tool_calls


def test_a_call_in_reasoning_is_none() -> None:
    chat = STYLES["chatml"].chat()
    thought = '<think>A <tool_call>{"name": "no"}</tool_call>?</think>'
    parsed = chat.read(response(chat, thought + 'Hm.<tool_call>{"name": "add"}</tool_call><|im_end|>'), tools=TOOLS)
    assert parsed.content == thought + "Hm." and [call.name for call in parsed.tool_calls] == ["add"]


@pytest.mark.parametrize(
    "damage", ["{", '{"name": 3}', '["add"]', '{"name": "add"} x', '{"name": "add", "arguments": 1}']
)
def test_a_damaged_call_is_text(damage: str) -> None:
    chat = STYLES["chatml"].chat()
    text = f"<tool_call>{damage}</tool_call>"
    assert chat.read(response(chat, text), tools=TOOLS).content == text
