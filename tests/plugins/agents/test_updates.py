"""Agents that know a base_url only, on the embedded engine, while its weights change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hwrl.rollout import EmbeddedEngine, Workflow
from tests.support.chat_models import STYLES
from tests.support.tiny_model import tiny_model
from tests.support.trained_agents import (
    Witness,
    check_tokens,
    standard_library_workflow,
    train_agents,
    workflow_of_the_page,
)


@pytest.mark.parametrize(
    ("make", "turns"), [(standard_library_workflow, 3), (workflow_of_the_page, 2)], ids=["standard library", "openai"]
)
def test_an_agents_tokens_are_the_engines_bit_for_bit_over_weight_updates(
    make: Callable[[], Workflow], turns: int
) -> None:
    workflow, style = make(), STYLES["chatml"]
    tokenizer = style.tokenizer()
    ends = tokenizer.convert_tokens_to_ids(list(style.ends))
    engine = EmbeddedEngine(tiny_model(vocabulary=len(tokenizer)), eos_ids=ends, max_running=16, max_length=400)
    witness = Witness(engine)

    def update() -> None:
        version = engine.version + 1
        weights = tiny_model(version, vocabulary=len(tokenizer)).state_dict()
        engine.load_weights(weights.items(), version=version)

    update()
    rows = train_agents(engine, workflow, tokenizer=tokenizer, end_ids=ends, update=update, steps_per_update=8)
    check_tokens(rows, witness, turns=turns, chat=style.chat())
    engine.close()
