"""``hwrl trl-demo``: TRL's GRPO on a tiny model, with hwrl's checkpoints and offload."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HELP = "train a tiny model with TRL's GRPOTrainer and hwrl's checkpoints; the same command resumes"
_DIGITS = [str(digit) for digit in range(10)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("directory", type=Path, help="for the model and the checkpoints")
    parser.add_argument("--steps", type=int, default=30, help="train until this step (default: %(default)s)")
    parser.add_argument("--save-steps", type=int, default=5, help="save every so many (default: %(default)s)")
    parser.add_argument("--offload", action="store_true", help="keep the optimizer's state on the host between steps")
    parser.add_argument("--server", metavar="URL", help="generate on this vLLM server of DIRECTORY/model")


def run(args: argparse.Namespace) -> int:
    """Train from the start or from the newest checkpoint. TRL prints the metrics of each step."""
    from hwrl_trl import CheckpointCallback, OffloadCallback, weights_by_hwrl

    for part in tiny_policy():
        part.save_pretrained(args.directory / "model")
    settings: dict[str, Any] = {"max_steps": args.steps, "save_steps": args.save_steps}
    callbacks = [OffloadCallback()] if args.offload else []
    sending = weights_by_hwrl() if args.server else nullcontext()
    if args.server:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": args.server}
    with sending:
        trainer = tiny_trainer(args.directory, callbacks=callbacks, **settings)
    with CheckpointCallback(trainer, args.directory / "checkpoints", max_ckpt_to_keep=2) as checkpoints:
        trainer.train(resume_from_checkpoint=checkpoints.resume_path())
    return 0


def tiny_trainer(directory: Path, *, callbacks: Sequence[Any] = (), **settings: Any) -> Any:
    """Return a GRPOTrainer for the tiny model; ``settings`` are those of its GRPOConfig. Ten steps are an epoch."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = tiny_policy()
    config = {
        "output_dir": str(directory),
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 8,
        "bf16": False,
        "use_cpu": not torch.accelerator.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        model,
        reward_funcs=share_of_sevens,
        args=GRPOConfig(**config | settings),
        train_dataset=prompts(),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


def share_of_sevens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the reward of each response: the share of its tokens that are 7."""
    return [ids.count(7) / len(ids) for ids in completion_ids]


def prompts() -> Any:
    """Return a data set of pairs of digits."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{first} {second}" for first in _DIGITS for second in _DIGITS[:4]]})


def tiny_policy() -> tuple[Any, Any]:
    """Return a float32 model of two small layers, and its tokenizer. The token id of a digit is its value."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

    words = {word: index for index, word in enumerate([*_DIGITS, "<end>", "<pad>"])}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_only, eos_token="<end>", pad_token="<pad>")
    set_seed(1)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the least that vLLM computes on CPUs
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=words["<end>"],
        pad_token_id=words["<pad>"],
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer
