"""Megatron's sharded state dicts in a CheckpointManager: made by hand, and those of real models and optimizers."""

from __future__ import annotations

import argparse
import itertools
import re
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing import assert_close

import hwrl
from hwrl.checkpoint import CheckpointInfo, CheckpointManager, LocalShards, find_checkpoints, read_tensors
from hwrl.comm import Comm, Group, connect_store, serve_store, store_address
from hwrl.errors import CheckpointCorruptError, CheckpointError, CheckpointSaveError, ConfigError
from hwrl.run.demo import write_demo
from hwrl.testing.processes import run_processes
from hwrl.train import PolicyLoss
from hwrl_megatron import prepare_process
from tests.support.megatron_batches import batch_of, settings_in

FORMATS = ("dp_reshardable", "fully_reshardable")


@pytest.fixture(autouse=True)
def _prepared() -> None:
    """Prepare the process before megatron is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron's
        prepare_process()


def same(one: Any, other: Any) -> None:
    """Raise if two nested values differ in anything but the order of keys, and in what pads Megatron's buffers."""
    if isinstance(one, dict) and not one.get("padding"):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            same(*pair)
    elif isinstance(one, torch.Tensor):
        assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif not isinstance(one, dict):
        assert one == other


# -- made by hand ---------------------------------------------------------------------------------------------------


def by_hand(value: float) -> dict[str, Any]:
    """Return a sharded state dict of one rank with each kind of thing that there is, filled with ``value``."""
    from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def halves(key: str, tensor: torch.Tensor, *_: Any) -> dict[str, Any]:
        parts = {"top": tensor[:2], "bottom": tensor[2:]}
        return {name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part) for name, part in parts.items()}

    def rows(count: int) -> torch.Tensor:
        return value * torch.arange(1.0, 2.0 * count + 1).view(count, 2)

    tied = ShardedTensor.from_rank_offsets("tied", rows(3))
    copy = ShardedTensor.from_rank_offsets("tied", torch.full((3, 2), value), replica_id=1)
    layers = [
        ShardedTensor.from_rank_offsets(
            "layers", (value + n) * torch.ones(4).to(torch.bfloat16), (0, n, 2), prepend_axis_num=1
        )
        for n in range(2)
    ]
    merged = ShardedTensorFactory("halves", rows(4), halves, lambda built: torch.cat([built["top"], built["bottom"]]))
    model = {"tied": tied, "copy": copy, "layers": layers, "merged": [merged], "turned": None, "scalar": None}
    model["turned"] = ShardedTensor.from_rank_offsets("turned", rows(4).t())
    model["scalar"] = ShardedTensor.from_rank_offsets("scalar", torch.tensor(value))
    model["empty"] = ShardedTensor("scalars", torch.empty(0), torch.float32, (0,), (3,), (0,), None)
    model["nothing"] = ShardedTensor.from_rank_offsets("nothing", torch.empty(0, 2))
    model["scalars"] = ShardedTensor("scalars", torch.full((3,), value), torch.float32, (3,), (3,), (0,), None)
    random = np.random.RandomState(int(abs(value))).get_state()  # of the classes that megatron-core allows itself
    bare = [b"\x00\xff" * int(value), None if value > 0 else 3, (value, {"seed": torch.tensor([value])}), random]
    objects = [ShardedObject("objects", one, (4,), (n,)) for n, one in enumerate(bare)]
    groups = [{"lr": value, "betas": (0.9, value), "params": LocalNonpersistentObject([value])}]
    return {
        "model": {**model, "_extra_state": objects},
        "optimizer": {"groups": groups, "state": {}, 0: {(torch.float32, torch.int64): [tied]}},
        "iteration": int(value),
        "args": argparse.Namespace(seed=value),
        "scale": torch.tensor(value),
    }


@pytest.mark.parametrize("async_save", [False, True])
def test_every_kind_of_thing_comes_back_as_megatron_would_give_it(tmp_path: Path, async_save: bool) -> None:
    from hwrl_megatron.sharded import ShardedState

    given, template = by_hand(2.0), ShardedState(by_hand(-1.0))
    with CheckpointManager(tmp_path, async_save=async_save) as manager:
        manager.save(1, ShardedState(given).state)
        given["model"]["tied"].data.zero_()  # in the background it is read from a copy
        assert manager.resume(template.state) is not None
    loaded = template.loaded()
    wanted = by_hand(2.0)
    assert loaded["optimizer"]["groups"] == [{"lr": 2.0, "betas": (0.9, 2.0), "params": [-1.0]}]
    assert loaded["args"] == argparse.Namespace(seed=2.0)
    assert (loaded["iteration"], loaded["scale"], loaded["optimizer"]["state"]) == (2, 2.0, {})
    same(loaded["optimizer"][0][torch.float32, torch.int64], [wanted["model"]["tied"].data])
    model = loaded["model"]
    assert model["_extra_state"][:3] == [b"\x00\xff\x00\xff", None, (2.0, {"seed": torch.tensor([2.0])})]
    np.random.RandomState().set_state(model["_extra_state"][3])
    np.testing.assert_equal(model["_extra_state"][3], wanted["model"]["_extra_state"][3].data)
    same(model["copy"], wanted["model"]["tied"].data)
    same(model["merged"], [wanted["model"]["merged"][0].data])
    same(model["layers"], [one.data for one in wanted["model"]["layers"]])
    for name in ("tied", "turned", "scalar", "scalars", "empty", "nothing"):
        same(model[name], wanted["model"][name].data)


REFUSED = {
    "an object with a function": r"'rng_state/shard_0.0_1.1' cannot be saved.*pickle that uses .*by_hand",
    "another value": r"'common.pt' cannot be saved.*pickle that uses numpy\.dtypes\.Int64DType",
    "no data": "'w' has no memory.*init_data",
    "two shapes": "two values of one name, 'w'",
    "two rectangles at one place": "two values of one name, 'w'",
    "a tensor and an object": "two values of one name, 'w/shard_0_1'",
    "two main replicas": "two values of one name, 'w'.*one main replica",
    "two main objects": "two values of one name, 'o'",
    "a list that is sharded in part": "put together again.*use a dict",
}


def refused(name: str) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    one, other = (ShardedTensor.from_rank_offsets("w", torch.ones(count)) for count in (2, 3))
    bare = ShardedTensor.from_rank_offsets("v", torch.ones(2))
    return {
        "an object with a function": {"rng": ShardedObject("rng_state", [{"draw": by_hand}], (1, 1), (0, 0))},
        "another value": {"args": {"sizes": np.arange(2)}},
        "no data": {"a": {"b": [one.without_data()]}},
        "two shapes": {"a": one, "b": other},
        "two rectangles at one place": {
            "a": one,
            "b": ShardedTensor("w", torch.ones(1), torch.float32, (1,), (2,), (0,), None),
        },
        "a tensor and an object": {
            "a": ShardedObject("w", 1, (1,), (0,)),
            "b": ShardedTensor.from_rank_offsets("w/shard_0_1", torch.ones(2)),
        },
        "two main replicas": {"a": one, "b": ShardedTensor.from_rank_offsets("w", torch.ones(2))},
        "two main objects": {name: ShardedObject("o", name, (1,), (0,)) for name in ("a", "b")},
        "a list that is sharded in part": {"a": [{"w": one, "lr": 1}, {"w": bare}]},
    }[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_named_and_the_next_save_works(tmp_path: Path, name: str) -> None:
    from hwrl_megatron.sharded import ShardedState

    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=f"(?s){REFUSED[name]}"):
            manager.save(1, ShardedState(refused(name)).state)
        manager.save(1, ShardedState(by_hand(1.0)).state)


def test_of_replicas_on_one_rank_the_main_one_is_saved_and_filled_and_of_a_view_only_itself(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from hwrl_megatron.sharded import ShardedState

    def given(value: float) -> dict[str, Any]:
        tensors = [torch.full((2,), one) for one in (-value, value)]
        replicas = {n: ShardedTensor.from_rank_offsets("w", tensors[n], replica_id=1 - n) for n in (0, 1)}
        objects = {n: ShardedObject("o", n * value, (1,), (0,), replica_id=(0, 1 - n)) for n in (0, 1)}
        return {"tensors": replicas, "objects": objects, "again": replicas[1], "first": torch.ones(1 << 18)[0]}

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, ShardedState(given(2.0)).state)
        template = given(3.0)
        state = ShardedState(template)
        manager.resume(state.state)
        assert manager.checkpoints()[0].nbytes < 1 << 16
    assert_close(template["tensors"][1].data, torch.full((2,), 2.0))
    loaded = state.loaded()
    same(loaded["tensors"], dict.fromkeys((0, 1), torch.full((2,), 2.0)))
    assert loaded["objects"] == {0: 2.0, 1: 2.0}


def test_nothing_is_taken_for_loaded_that_was_not(tmp_path: Path) -> None:
    from hwrl_megatron.sharded import ShardedState

    template = ShardedState(by_hand(0.0))
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(template.state) is None
        manager.save(1, ShardedState(by_hand(1.0)).state)
        manager.resume(dict(template.state))
        with pytest.raises(CheckpointError, match="nothing was loaded"):
            template.loaded()


def test_another_padding_of_the_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    from hwrl_megatron.sharded import ShardedState

    def embedding(rows: int) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("word_embeddings", torch.ones(rows, 2), allow_shape_mismatch=True)}

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, ShardedState(embedding(8)).state)
        with pytest.raises(CheckpointError, match=r"(?s)'word_embeddings' is .*\[8, 2\].*\[10, 2\]"):
            manager.resume(ShardedState(embedding(10)).state)


def test_only_a_whole_checkpoint_of_a_sharded_state_is_exported_and_replaces_nothing(tmp_path: Path) -> None:
    from hwrl_megatron.sharded import ShardedState, export

    with CheckpointManager(tmp_path / "own") as manager:
        manager.save(1, {"w": torch.ones(2)})
        manager.save(2, {"common.pt": 5})
        manager.save(3, ShardedState(by_hand(1.0)).state)
        *foreign, good = manager.checkpoints()
    for one in foreign:
        with pytest.raises(CheckpointError, match="not the state of a ShardedState"):
            export(one, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists"):
        export(good, str(tmp_path / "own"))
    with pytest.raises(CheckpointError, match=r"(?s)cannot be exported.*MANIFEST\.json"):
        export(good, good.path / "MANIFEST.json" / "out")
    flip_a_bit(good)
    with pytest.raises(CheckpointCorruptError):
        export(good, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def flip_a_bit(info: CheckpointInfo) -> None:
    path = info.path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_example_in_the_manual_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "megatron.md", "exec"), {})
    assert f"print(state.loaded())  # {capsys.readouterr().out.strip()}\n" in block


# -- real models and optimizers -------------------------------------------------------------------------------------


def demo_in(directory: Path) -> Path:
    write_demo(directory, seed=3, prompts=16)
    return directory


class Training:
    """Megatron's model and distributed optimizer, which hwrl's engine made; the rest is as in any other program."""

    def __init__(self, demo: Path, *, group: Group | None = None, tensor_parallel: int = 1) -> None:
        from hwrl_megatron import hwrl_train_engine

        options = {"tensor_parallel": tensor_parallel}
        self.engine = cast(
            Any, hwrl_train_engine(settings=settings_in(demo), options=options, backend=hwrl.get_backend(), group=group)
        )
        self.model = self.engine.model.module
        (self.optimizer,) = self.engine.optimizer.chained_optimizers
        self.optimizer.data_parallel_group_gloo = self.optimizer.data_parallel_group  # it is one, on the host
        self._expect_steps_by_parameter()
        self.train(99)  # Megatron can say nothing of an optimizer without state; and a load replaces all of it

    def _expect_steps_by_parameter(self) -> None:
        """Let Megatron load into torch's AdamW, which, unlike the fused ones, has a step for each parameter."""
        load = self.optimizer._set_main_param_and_optimizer_states

        def load_all_but_step(parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
            own = self.optimizer._get_main_param_and_optimizer_states(parameter)
            step = own["step"].clone()  # all have been given the same one
            self.optimizer.optimizer.state[own["param"]]["step"] = step
            load(parameter, {**tensors, "step": step})

        self.optimizer._set_main_param_and_optimizer_states = load_all_but_step

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def train(self, step: int) -> dict[str, float]:
        share = slice(self.engine.data_parallel_rank, None, self.engine.data_parallel_size)
        metrics: dict[str, float] = self.engine.train_batch(batch_of(share, seed=step), loss=PolicyLoss("tis"))
        return metrics

    def sharded(self, kind: str, *, loading: bool) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": True}
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer, "updates": self.engine.updates}

    def save(self, manager: CheckpointManager, step: int, kind: str) -> None:
        from hwrl_megatron.sharded import ShardedState

        manager.save(step, ShardedState(self.sharded(kind, loading=False)).state)

    def resume(self, manager: CheckpointManager, kind: str) -> tuple[int, dict[str, Any]]:
        from hwrl_megatron.sharded import ShardedState

        state = ShardedState(self.sharded(kind, loading=True))
        resumed = manager.resume(state.state)
        assert resumed is not None
        loaded = state.loaded()
        with torch.no_grad():
            self.model.load_state_dict(loaded["model"])
            self.optimizer.load_state_dict(loaded["optimizer"])
        self.engine.updates = loaded["updates"]
        return resumed.step, loaded


@pytest.mark.parametrize("kind", FORMATS)
def test_a_broken_checkpoint_is_passed_over_and_training_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    demo = demo_in(tmp_path)
    with CheckpointManager(tmp_path / "own", async_save=True, max_ckpt_to_keep=2) as manager:
        with Training(demo) as training:
            for step in (1, 2, 3):
                training.train(step)
                training.save(manager, step, kind)
            wanted = training.train(4)
        manager.wait()
        older, newest = manager.checkpoints()
        assert (older.step, newest.step) == (2, 3)
        flip_a_bit(newest)
        with Training(demo) as training:
            assert training.resume(manager, kind)[0] == 2
            training.train(3)
            assert training.train(4) == wanted


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what Megatron calls in torch
@pytest.mark.parametrize("kind", FORMATS)
def test_megatrons_own_loader_reads_an_export(tmp_path: Path, kind: str) -> None:
    from hwrl_megatron.sharded import export

    with Training(demo_in(tmp_path)) as training:
        with CheckpointManager(tmp_path / "own") as manager:
            training.save(manager, 1, kind)
            training.train(1)
            _, wanted = training.resume(manager, kind)
            wanted = copied(wanted)
            export(manager.checkpoints()[0], tmp_path / "iter_0000001")
        from megatron.core import dist_checkpointing

        training.train(2)
        for strict in ("assume_ok_unexpected", "raise_all"):
            template = training.sharded(kind, loading=True)
            same(dist_checkpointing.load(template, str(tmp_path / "iter_0000001"), strict=strict), wanted)
            assert torch.count_nonzero(training.model.output_layer.weight)
            training.model.output_layer.weight.data.zero_()


def copied(nested: Any) -> Any:
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

    return dict_list_map_outplace(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, nested)


def share_of_training(rank: int, address: str, demo: Path) -> None:
    """Go on with tensor parallelism, then with data parallelism, each from what was saved before."""
    group = Comm().init_default(store=connect_store(address), rank=rank, size=2)
    for step, tensor_parallel in ((2, 2), (3, 1)):
        with (
            Training(demo, group=group, tensor_parallel=tensor_parallel) as training,
            CheckpointManager(demo / "own", group=group) as manager,
        ):
            assert training.resume(manager, "fully_reshardable")[0] == step - 1
            note(training, demo / f"after-{step - 1}", group)
            training.train(step)
            training.save(manager, step, "fully_reshardable")
            note(training, demo / f"before-{step}", group)
            if tensor_parallel == 1:
                with CheckpointManager(demo / "dp", group=group) as other:
                    training.save(other, step, "dp_reshardable")
    disagree(rank, demo, group)
    group.close()


def disagree(rank: int, demo: Path, group: Group) -> None:
    """Save what ranks have differently: rectangles that overlap are refused, of other values rank 0's counts."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from hwrl_megatron.sharded import ShardedState

    whole = ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=rank)
    half = ShardedTensor("w", torch.ones(2), torch.float32, (2,), (4,), (2,), None, replica_id=rank)
    with CheckpointManager(demo / "other", group=group) as manager:
        with pytest.raises(CheckpointSaveError, match="overlap or do not cover the tensor"):
            manager.save(1, ShardedState({"w": half if rank else whole}).state)
        kinds = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16), torch.ones(5), "value"]
        for one, other in itertools.permutations(kinds, 2):
            with pytest.raises(CheckpointSaveError, match=r"'w' is .* in one entry and .* in another"):
                manager.save(1, {"w": _half(other if rank else one, rank)})
        with pytest.raises(CheckpointError, match="contains a DTensor"):
            ShardedState({"w": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)))})
        manager.save(1, ShardedState({"w": whole, "iteration": rank, "only": {rank: 0}}).state)
        state = ShardedState({"w": whole, "iteration": None})
        manager.resume(state.state)
        assert (state.loaded()["iteration"], state.loaded()["only"]) == (0, {0: 0})


def _half(value: Any, rank: int) -> Any:
    """Return a rank's part of a tensor of two ranks; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return LocalShards(value.shape, value.dtype, {(2 * rank,): value[2:] if rank else value[:2]})


def note(training: Training, directory: Path, group: Group | None) -> None:
    """Write the whole of parameters and moments, as the engine itself would save them."""
    with CheckpointManager(directory, group=group) as manager:
        manager.save(1, training.engine.state_dict())


def noted(directory: Path) -> dict[str, torch.Tensor]:
    (info,) = find_checkpoints(directory)[0]
    return read_tensors(info, prefix="")


def test_it_goes_on_with_tensor_then_data_parallelism_and_back(tmp_path: Path) -> None:
    demo = demo_in(tmp_path)
    with Training(demo) as training, CheckpointManager(demo / "own") as manager:
        training.train(1)
        training.save(manager, 1, "fully_reshardable")
        note(training, demo / "before-1", None)
    store = serve_store()
    run_processes(share_of_training, 2, store_address(store), demo, timeout_s=2400)
    for directory, kind in (("own", "fully_reshardable"), ("dp", "dp_reshardable")):
        with Training(demo) as training, CheckpointManager(demo / directory) as manager:
            assert training.resume(manager, kind)[0] == 3
            note(training, demo / f"{directory}-after-3", None)
        same(noted(demo / f"{directory}-after-3"), noted(demo / "before-3"))
    for step in (1, 2):
        same(noted(demo / f"after-{step}"), noted(demo / f"before-{step}"))
    weights = [noted(demo / f"before-{step}")["model.lm_head.weight"] for step in (1, 2, 3)]
    assert not any(torch.equal(*pair) for pair in itertools.pairwise(weights)), "training changed them"
