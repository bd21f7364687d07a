"""The seconds of a weight update in verl, hwrl's engine beside verl's NCCL engine over Gloo, in turns in one run.

``ci/stack verl python -m tests.plugins.verl.compare --hidden 512``. The processes, verl's manager and its FSDP2 actors
are the same for both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from hwrl.comm import serve_store, store_address
from tests.plugins.verl import actors, nccl_on_gloo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    model = Path(tempfile.mkdtemp())
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3",
            vocab_size=32_000,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=args.hidden // 8,
        )
    )
    made.save_pretrained(model)
    nbytes = sum(tensor.nbytes for tensor in made.state_dict().values())
    with actors.cluster():
        sync = {"hwrl": actors.sync_config(), "nccl": actors.sync_config("nccl", multi_sender=False)}
        trainers = actors.actors(model, 2, sync=sync["hwrl"])
        workers, replicas = actors.rollouts(model, args.workers, sync=sync["hwrl"])
        store = serve_store()
        nccl_on_gloo.install(store_address(store))  # verl's manager looks it up here
        for group in (trainers, workers):
            group.install_nccl_on_gloo(store_address(store))
        seconds: dict[str, list[float]] = {"hwrl": [], "nccl": []}
        for turn in range(args.turns + 1):
            for name in seconds:
                for group in (trainers, workers):
                    group.use_engine(sync[name])
                manager = actors.CheckpointEngineManager(sync[name], trainers, replicas)
                manager.update_weights(global_steps=turn)  # connections, layouts
                begin = time.monotonic()
                manager.update_weights(global_steps=turn)
                seconds[name].append(time.monotonic() - begin)
        del store
    print(f"{nbytes / 1e6:.0f} MB to {args.workers} workers, seconds of an update (median, all):")
    for name, measured in seconds.items():
        print(f"  {name:5} {statistics.median(measured[1:]):.2f}  {[round(one, 2) for one in measured[1:]]}")


if __name__ == "__main__":
    main()
