"""The run's tokenizer: the model's, with the run's chat template and its options."""

from __future__ import annotations

from typing import Any

from hwrl.models import load_tokenizer, use_chat_template
from hwrl.run.config import Config
from hwrl.run.identity import TEMPLATE, RunInputs


def run_tokenizer(config: Config, inputs: RunInputs) -> Any:
    """Return a tokenizer for prompts, workflows and rewards. Raises ConfigError for an option that does nothing."""
    tokenizer, template = load_tokenizer(config.model.path), config.data.chat_template
    if template is not None:
        template = inputs.read(TEMPLATE).decode() if TEMPLATE in inputs.files else template
    use_chat_template(tokenizer, template, options=config.data.chat_template_kwargs)
    return tokenizer
