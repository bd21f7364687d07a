"""A short GRPO run of verl with hwrl as checkpoint engine, platform and training engine, on a tiny random model.

``python -m tests.plugins.verl.grpo --backend cuda --actors 1 --rollouts 1`` where verl and its vLLM are installed, on
two devices. It starts verl's own ``one_step_off_policy`` trainer: actors and rollouts on devices of their own. With
``--config-only`` verl composes and checks the configuration, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[3]
MAIN = "verl.experimental.one_step_off_policy.main_ppo"
REWARD = '''def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    """Return the share of the wanted digit in the response."""
    return solution_str.count(ground_truth) / max(1, len(solution_str))
'''
ENV = {
    "VERL_PLATFORM": "hwrl",
    "VERL_ENGINE_VENDOR": "hwrl",
    "VERL_USE_EXTERNAL_MODULES": "hwrl_verl.platform",
}
ENV_ON_CPU = {
    "VERL_USE_EXTERNAL_MODULES": "tests.plugins.verl.on_cpu",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
METRICS = "metrics.jsonl"
SELECTION = [
    "actor_rollout_ref.rollout.checkpoint_engine.backend=hwrl",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=hwrl_verl.checkpoint_engine",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.checkpoint.async_save=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
]
"""verl's settings that select hwrl."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda", help="hwrl's backend of the devices")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=Path("demo/verl-grpo"))
    parser.add_argument("--config-only", action="store_true")
    args = parser.parse_args()
    directory = args.directory.absolute()
    write_inputs(directory)
    options = settings(directory, actors=args.actors, rollouts=args.rollouts, steps=args.steps)
    if args.backend == "cpu":
        options += settings_on_cpu(devices=args.actors + args.rollouts)
    options += ["--cfg", "job", "--resolve"] if args.config_only else []
    env = environment(directory, backend=args.backend)
    returncode = subprocess.run([sys.executable, "-m", MAIN, *options], env=env, check=False).returncode
    if returncode == 0 and not args.config_only:
        print(summary(directory))
    sys.exit(returncode)


def environment(directory: Path, *, backend: str) -> dict[str, str]:
    """Return this process's environment with hwrl selected. Ray's workers also import the tests."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | ENV | (ENV_ON_CPU if backend == "cpu" else {})
    return env | {"HWRL_BACKEND": backend, "PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(directory / METRICS)}


def settings(directory: Path, *, actors: int, rollouts: int, steps: int) -> list[str]:
    """Return verl's settings: those that select hwrl, and others that make a run small."""
    return [
        *SELECTION,
        "hydra.searchpath=[pkg://verl.trainer.config]",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={directory}/prompts.parquet",
        f"data.val_files={directory}/prompts.parquet",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        f"reward.custom_reward_function.path={directory}/reward.py",
        f"actor_rollout_ref.model.path={directory}/model",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",  # FlashAttention may not be installed
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "+actor_rollout_ref.rollout.enable_sleep_mode=false",  # the rollouts have their devices for themselves
        "actor_rollout_ref.rollout.max_model_len=64",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",  # verl's, of one engine
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "ray_kwargs.ray_init.num_cpus=32",  # verl's main task alone wants ten
        "+ray_kwargs.ray_init.include_dashboard=false",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        f"trainer.default_local_dir={directory}/checkpoints",
        "trainer.logger=[console,file]",
        f"hydra.run.dir={directory}/hydra",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={actors}",
        "trainer.save_freq=10",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "rollout.nnodes=1",
        f"rollout.n_gpus_per_node={rollouts}",
    ]


def settings_on_cpu(*, devices: int) -> list[str]:
    """Return what else verl needs without devices; :mod:`tests.plugins.verl.on_cpu` has the reasons."""
    worker = "tests.plugins.verl.vllm_on_cpu.Extension"
    return [
        "trainer.device=cpu",
        f"+ray_kwargs.ray_init.num_gpus={devices}",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls={worker}",
    ]


def summary(directory: Path) -> str:
    """Return the run in one line: its steps, and how the reward rose."""
    steps = [json.loads(line)["data"] for line in (directory / METRICS).read_text().splitlines()]
    first, last = (step["critic/score/mean"] for step in (steps[0], steps[-1]))
    return f"{len(steps)} steps, reward from {first:.2f} to {last:.2f}"


def write_inputs(directory: Path) -> None:
    """Write a random model with a tokenizer, prompts, and a reward function."""
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    from hwrl.run.demo import ALPHABET, write_model

    (directory / "model").mkdir(parents=True, exist_ok=True)
    alphabet = [*ALPHABET, "\n", "<|im_end|>"]  # verl looks for these two in the tokenizer of a Qwen
    write_model(directory / "model", alphabet=alphabet, seed=1, hidden=128)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "model")
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{index:03d}>"}],
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"index": index},
        }
        for index in range(256)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "prompts.parquet")
    (directory / "reward.py").write_text(REWARD)


if __name__ == "__main__":
    main()
