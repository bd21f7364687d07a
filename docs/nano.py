"""Asynchronous GRPO on one page, made of hwrl's parts: ``python docs/nano.py DIR [STEPS]``.

The main thread trains. A second thread generates, with weights up to MAX_STALENESS versions old. ``hwrl train`` runs
the same parts as processes. Kill this program at any time: the same command resumes from the newest checkpoint.
"""

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch

import hwrl
from hwrl import rollout
from hwrl.checkpoint import CheckpointManager
from hwrl.comm import serve_store
from hwrl.interfaces import LossInputs, PromptGroup, Sampling
from hwrl.memory import Offloader
from hwrl.train import PolicyLoss
from hwrl.weights import WeightReceiver, WeightSender

GROUPS, GROUP_SIZE, LENGTH = 16, 8, 4  # prompts of a step, responses to each, tokens of each
MAX_STALENESS = 1  # 0: synchronous, on-policy training
METADATA = {rollout.INCARNATION: 0}  # of each version: the rollouter has had one trainer


def reward(prompt: str, response: str, answer: str) -> float:
    """The task: repeat the digit of the prompt. hwrl calls this in a process of its own."""
    return response.count(answer) / LENGTH


class Ledger:
    """The prompt ledger for two threads: it keeps the staleness bound. The rollouter calls the last four methods."""

    def __init__(self, ledger: rollout.PromptLedger) -> None:
        self.ledger, self.changed = ledger, threading.Condition()

    def take(self, version: int, generating: Future[None]) -> tuple[list[PromptGroup], dict]:
        """Note that ``version`` is published; wait for the groups of a step. The state counts them as trained."""
        with self.changed:
            self.ledger.advance(version)
            while (groups := self.ledger.take(GROUPS)) is None:
                self.changed.wait(0.1)
                if generating.done():
                    generating.result()  # raises the error that ended the rollouter
            return groups, self.ledger.state_dict()

    def lease(self, count: int) -> Future[list[rollout.PromptLease]]:
        leases: Future[list[rollout.PromptLease]] = Future()
        with self.changed:
            leases.set_result(self.ledger.lease(count, replica="nano", now_s=time.monotonic()))
        return leases

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        with self.changed:
            for group in groups:
                self.ledger.complete(group)
            self.changed.notify()

    def fail(self, lease: rollout.PromptLease, reason: str) -> None:
        with self.changed:
            self.ledger.fail(lease, reason=reason)

    def renew(self, leases: Sequence[rollout.PromptLease]) -> None:
        with self.changed:
            self.ledger.renew(leases, now_s=time.monotonic())


def make_model() -> torch.nn.Module:
    """Return a model of ten digits and an end token. Any causal language model of transformers will do."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config = Qwen3Config(vocab_size=11, num_attention_heads=2, num_key_value_heads=1, **sizes)
    return Qwen3ForCausalLM(config).to(hwrl.get_backend().device())


def joined(arrays: Iterable[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(arrays))).to(hwrl.get_backend().device())


def grpo_loss(model: torch.nn.Module, groups: Sequence[PromptGroup]) -> torch.Tensor:
    """Return the mean loss of all tokens: advantages within a group, and PPO's clip against staleness."""
    rows = [joined([group.prompt_ids, group.token_ids[own]]).long() for group in groups for own in group.responses()]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    scores = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    lengths = joined(group.lengths for group in groups)  # of the responses; each prompt is one token
    new = torch.cat([scores[index, :length] for index, length in enumerate(lengths)])
    old = joined(group.logprobs for group in groups)
    advantages = joined((group.rewards - group.rewards.mean()) / (group.rewards.std() + 1e-6) for group in groups)
    row = torch.arange(len(rows), device=new.device).repeat_interleave(lengths)
    inputs = LossInputs(
        logprobs=new, behaviour=old, advantages=advantages[row], rows=row, row_count=len(rows), entropy=0 * new
    )
    return PolicyLoss("ppo_clip")(inputs)[0].mean()


def main(directory: str, steps: int = 60) -> None:
    """Train up to ``steps``, from the newest checkpoint in ``directory``."""
    store, stop = serve_store(), threading.Event()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = rollout.EmbeddedEngine(make_model(), eos_ids=[10], max_running=GROUPS * GROUP_SIZE, max_length=1 + LENGTH)
    ledger = rollout.PromptLedger(groups_per_version=GROUPS, max_staleness=MAX_STALENESS, total_groups=steps * GROUPS)
    digits = [rollout.Prompt(str(digit), np.array([digit], dtype=np.int32), str(digit)) for digit in range(10)]
    with (
        CheckpointManager(directory, model=model, optimizer=optimizer, async_save=True) as checkpoints,
        Offloader(model, optimizer) as offloader,
        WeightSender(store, transport="host") as sender,
        WeightReceiver(store, replica="nano") as receiver,
        ThreadPoolExecutor() as threads,
        ExitStack() as ending,
    ):
        ending.callback(stop.set)
        if (resumed := checkpoints.resume()) is not None:
            ledger.load_state_dict(resumed.extra["ledger"], incarnation=0)
        done, shared = resumed.step if resumed else 0, Ledger(ledger)
        sender.publish(done, model, METADATA)
        link = rollout.ReceivedModels(engine, receiver, timeout_s=60)
        rollouter = rollout.Rollouter(
            engine,
            weights=link,
            ledger=shared,
            prompts=rollout.PromptStream([rollout.PromptSet("digits", digits)], seed=0),
            rewards=rollout.RewardWorkers(f"{__file__}:reward", decode=lambda ids: "".join(map(str, ids))),
            settings=rollout.LoopSettings(sampling=Sampling(LENGTH), group_size=GROUP_SIZE),
        )
        generating = threads.submit(rollouter.run, stop)
        offloader.offload()
        for step in range(done + 1, steps + 1):
            groups, state = shared.take(step - 1, generating)  # meanwhile the model and its optimizer are on the host
            with offloader.loaded():
                grpo_loss(model, groups).backward()
                optimizer.step()
                optimizer.zero_grad()
                sender.publish(step, model, METADATA)
            print(f"step {step}: reward {np.mean([group.rewards for group in groups]):.3f}", flush=True)
            if step % 10 == 0:
                with offloader.lending():  # the save reads the host's copies
                    checkpoints.save(step, weight_version=step, extra={"ledger": state}, offloader=offloader)


if __name__ == "__main__":
    is_call = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])) if is_call else __doc__)  # type: ignore[func-returns-value]
