"""Tokenizers of characters, each with a chat template in the style of a family of models."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hwrl.rollout import ChatTokens

_CHARACTERS = sorted({*string.printable} - {"\t", "\r", "\x0b", "\x0c"})

CHATML = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set said = message.content %}
{%- if message.role == 'assistant' and not loop.last and '</think>' in said %}
{%- set said = said.split('</think>')[-1] | trim %}
{%- endif %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + said + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + said }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Reasoning of earlier answers is dropped, as by the models that think."""

HEADERS = """{{ '<|begin|>' }}
{%- for message in messages %}
{{- '<|header|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header|>\\n\\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- {'name': call.name, 'parameters': call.arguments} | tojson }}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}"""
"""Calls of tools replace the content, and may end with a token of their own."""

INSTRUCT = """{{ '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'tool' %}{{ '[RESULT] ' + message.content + ' [/RESULT]' }}
{%- elif message.tool_calls %}{{ '[CALL] ' + (message.tool_calls[0].function | tojson) + '</s>' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + ' </s>' }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}
{%- endfor %}"""
"""White space stands before the end token, and no start of an answer exists."""

CHANNELS = """
{%- set ns = namespace(tool=none) %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not ns.tool %}{{ raise_exception('a tool without a call') }}{% endif %}
{{- '<|start|>' + ns.tool + '<|message|>' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{%- set ns.tool = call.name %}
{{- '<|start|>assistant to=' + call.name + '<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""The result of a tool needs the call before it."""


@dataclass(frozen=True)
class Style:
    """A chat template, its special tokens, and those of them that end a response."""

    template: str
    special: Sequence[str]
    ends: Sequence[str]

    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {token: number for number, token in enumerate(["<pad>", *self.special, *_CHARACTERS])}
        made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        made.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made,
            pad_token="<pad>",
            eos_token=self.ends[0],
            additional_special_tokens=list(self.special),
        )
        tokenizer.chat_template = self.template
        return tokenizer

    def chat(self, *, max_length: int | None = None) -> ChatTokens:
        tokenizer = self.tokenizer()
        ends = tokenizer.convert_tokens_to_ids(list(self.ends))
        return ChatTokens(tokenizer, end_ids=ends, max_length=max_length)


_TURN_ENDS = ("<|eot|>", "<|eom|>")
STYLES = {
    "chatml": Style(CHATML, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>")),
    "headers": Style(HEADERS, ("<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>", "<|eom|>"), _TURN_ENDS),
    "instruct": Style(INSTRUCT, ("<s>", "</s>", "[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[CALL]"), ("</s>",)),
    "channels": Style(CHANNELS, ("<|start|>", "<|message|>", "<|end|>", "<|call|>"), ("<|end|>", "<|call|>")),
}
