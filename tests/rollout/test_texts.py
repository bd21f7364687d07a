"""Texts that others wrote, on their way to tokens and back: unchanged, through one encoder, in bounded time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.errors import DataError
from hwrl.interfaces import Trajectory
from hwrl.rollout import ChatTokens, PolicyClient, Prompt, Prompts
from hwrl_workflows import environment, tool_use
from tests.support.agents import ScriptedPolicy, ask, chatml_policy, served
from tests.support.chat_models import STYLES, Style
from tests.support.sources import REPO

HUGE = 10_000_000
CALL = {"name": "shout", "arguments": {"count": HUGE}}
USER = {"role": "user", "content": "1 + 1?"}


class CountingTokenizer:
    """A tokenizer that notes the length of each text that it encodes, and the thread."""

    def __init__(self, tokenizer: Any, calls: list[tuple[int, int]]) -> None:
        self._tokenizer, self.calls = tokenizer, calls

    def __call__(self, text: str, **options: Any) -> Any:
        self.calls.append((len(text), threading.get_ident()))
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __deepcopy__(self, memo: Any) -> CountingTokenizer:
        return CountingTokenizer(self._tokenizer, self.calls)


def counted(policy: ScriptedPolicy) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    policy.chat.tokenizer = CountingTokenizer(policy.chat.tokenizer, calls)
    return calls


class Shouts:
    """An environment with observations of any length."""

    def __init__(self, *, first: int = 1, later: int = 1) -> None:
        self.first, self.later = first, later
        self.actions: list[str] = []
        made.append(self)

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "a" * self.first, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return "a" * self.later, 1.0, False, False, {}


made: list[Shouts] = []


def shout(count: int) -> str:
    """Shout.

    Args:
        count: how much
    """
    return "a" * count


def play(policy: ScriptedPolicy, *, max_turns: int = 2, **options: int) -> Trajectory:
    workflow = environment(
        tokenizer=policy.chat.tokenizer, make=f"{__name__}:Shouts", make_options=options, max_turns=max_turns
    )
    return run(workflow, policy, Prompt("Go.", policy.chat.encode("Go."), None))


def converse(policy: ScriptedPolicy) -> Trajectory:
    prompt = Prompt("Go.", policy.chat.encode("Go."), None, messages=[USER])
    return run(tool_use(tokenizer=policy.chat.tokenizer, tools=[f"{__name__}:shout"]), policy, prompt)


def run(workflow: Any, policy: ScriptedPolicy, prompt: Prompt) -> Trajectory:
    limits: Any = {"sampling": policy.sampling, "max_length": policy.max_length, "vocabulary": 1000}
    row = asyncio.run(workflow(PolicyClient(policy.generate, chat=policy.chat, **limits), prompt))
    assert isinstance(row, Trajectory)
    return row


def test_an_observation_that_cannot_fit_is_not_encoded_and_ends_the_episode() -> None:
    policy = chatml_policy("1")
    calls = counted(policy)
    row = play(policy, later=HUGE)
    assert row.truncated and row.metrics["turns"] == 1 and row.reward == 1.0
    with pytest.raises(DataError, match="has no turn"):
        play(policy, first=HUGE)
    assert max(calls)[0] < 100


def test_a_tools_result_that_cannot_fit_is_not_encoded_and_ends_the_conversation() -> None:
    policy = chatml_policy(f"<tool_call>{json.dumps(CALL)}</tool_call>")
    calls = counted(policy)
    row = converse(policy)
    assert row.truncated and row.metrics["tool_calls"] == 1 and max(calls)[0] < 1000


def test_an_agents_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    policy = chatml_policy("1")
    calls = counted(policy)

    async def both() -> list[Any]:
        async with served(policy) as endpoint:
            chat = await ask(endpoint, "chat/completions", {"messages": [{**USER, "content": "a" * HUGE}]})
            return [chat, await ask(endpoint, "completions", {"prompt": "a" * HUGE})]

    for answer in asyncio.run(both()):
        assert answer.status == 400 and answer.body["error"]["code"] == "context_length_exceeded"
        assert "10,000,0" in answer.body["error"]["message"]
    assert not calls


@pytest.mark.parametrize("prompt", ["a" * HUGE, [{**USER, "content": "a" * HUGE}]])
def test_a_row_that_cannot_fit_is_refused_with_its_place_before_it_is_encoded(tmp_path: Path, prompt: Any) -> None:
    policy = chatml_policy(max_length=50)
    calls = counted(policy)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "answer": 1}))
    with pytest.raises(DataError, match=r"rows.jsonl, line 1 has too long a prompt(.|\n)*10,000,0"):
        list(Prompts(file, encode=policy.chat.encode_prompt, max_prompt_tokens=50))
    assert not calls


def test_a_long_text_that_may_fit_is_encoded_beside_the_event_loop() -> None:
    policy = chatml_policy("1", max_length=200_000)
    calls = counted(policy)
    row = play(policy, later=100_000)
    assert not row.truncated or row.metrics["turns"] == 2
    long = {thread for length, thread in calls if length > 50_000}
    short = {thread for length, thread in calls if length < 100}
    assert len(long) == 1 and short == {threading.get_ident()} and not long & short


def test_a_text_full_of_the_mark_costs_as_much_as_any_other() -> None:
    chat = STYLES["chatml"].chat()

    def time_of(text: str) -> float:
        begin_s = time.process_time()
        new = {"role": "user", "content": text}
        rest = chat.following([USER, {"role": "assistant", "content": "2"}, new], at=1, said=chat.encode("2<|im_end|>"))
        assert text in chat.decode(rest, special=True)
        return time.process_time() - begin_s

    time_of("a")
    mark = "THE POLICY SAID THIS"
    usual = time_of("b" * 30_000)
    for hostile in (mark + "!" * 30_000, mark * 1500, f"{mark} " + "0" * 30_000):
        assert time_of(hostile) < 30 * usual + 0.2


# -- nothing on the way changes a text ------------------------------------------------------------------------------


def test_the_environment_reads_what_the_policy_wrote() -> None:
    policy = chatml_policy("x != y . Do n't ?")
    policy.chat.tokenizer.clean_up_tokenization_spaces = True
    play(policy, max_turns=1)
    assert made[-1].actions == ["x != y . Do n't ?"]


def test_one_function_decodes() -> None:
    """All others would have to repeat its options: a tokenizer "cleans up" by its own."""
    files = [path for path in (REPO / "hwrl").rglob("*.py") if "skip_special_tokens" in path.read_text()]
    assert files == [REPO / "hwrl/rollout/chat.py"]
    assert not [p for p in (REPO / "hwrl").rglob("*.py") if "tokenizer.decode(" in p.read_text() and p not in files]


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("arguments", ['{"a": 1, "b": [true]}', {"a": 1, "b": [True]}], ids=["text", "object"])
def test_a_conversation_has_the_same_tokens_in_a_row_and_in_a_workflow(
    tmp_path: Path, style: Style, arguments: Any
) -> None:
    chat = style.chat()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    talk: Any = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": talk, "answer": 1}))
    (row,) = Prompts(file, encode=chat.encode_prompt, max_prompt_tokens=1000)
    objects: Any = [
        {**one, "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1, "b": [True]}}}]}
        if "tool_calls" in one
        else one
        for one in talk
    ]
    assert row.token_ids.tolist() == chat.prompt(talk).tolist() == chat.prompt(objects).tolist()


def chat_that_adds_a_space(scheme: str) -> ChatTokens:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(["<unk>", "</s>", "\u2581", "\n", *"abcdefgh"])}
    made = Tokenizer(models.BPE(letters, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    return ChatTokens(tokenizer, end_ids=[1])


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("text", ["ab", " ab", "\nab", "ab cd"])
def test_a_text_that_continues_gets_no_space_that_it_does_not_have(scheme: str, text: str) -> None:
    chat = chat_that_adds_a_space(scheme)
    begun = chat.encode_prompt("gh")[1]
    whole = np.concatenate([begun, chat.encode(text)])
    assert chat.decode(whole, special=True) == "gh" + text


def test_a_string_that_the_tokenizer_would_end_stays_open() -> None:
    from tokenizers import processors

    chat = chat_that_adds_a_space("never")
    chat.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A </s>", special_tokens=[("<unk>", 0), ("</s>", 1)]
    )
    assert chat.tokenizer("ab")["input_ids"][-1] == 1
    begun = chat.encode_prompt("ab")[1].tolist()
    assert begun[0] == 0 and begun[1:] == chat.encode("ab").tolist()
    assert chat.encode_prompt("ab</s>")[1].tolist() == [*begun, 1], "the row's own end"


def test_special_tokens_of_a_template_stay_whole_whatever_the_tokenizer_splits() -> None:
    chat = STYLES["chatml"].chat()
    usual = chat.prompt([USER]).tolist()
    chat.tokenizer.split_special_tokens = True
    assert chat.prompt([USER]).tolist() == usual
