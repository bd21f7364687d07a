"""Several real ranks agree on a save: over large values, when one of them cannot save, and about names of their own."""

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hwrl.checkpoint import CheckpointInfo, CheckpointManager, DurableFS, find_checkpoints, resume
from hwrl.checkpoint import agreement as agreement_module
from hwrl.checkpoint.agreement import Agreement
from hwrl.checkpoint.manifest import corrupt_error, inspect_checkpoint
from hwrl.comm import Comm, Group, await_keys
from hwrl.errors import CheckpointCorruptError, CheckpointError, CheckpointSaveError, ConfigError, HwrlError
from hwrl.memory import Offloader
from hwrl_cpu import INFO, CpuBackend
from tests.support.group_ranks import BACKEND, on_ranks

TIMEOUT_S = 200.0


def open_manager(group: Group, directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, group=group, **{"backend": BACKEND, "timeout_s": TIMEOUT_S, **options})


def noise(seed: int, mib: float) -> str:
    """Return a text of at least ``mib`` after compression."""
    return random.Random(seed).randbytes(int(mib * (1 << 20))).hex()


def _leave_late(group: Group) -> float:
    agreement = Agreement(group.store, rank=group.rank, size=group.size, timeout_s=TIMEOUT_S)
    with agreement.round():
        pass
    agreement.begin_call(1)
    known_s = 0.0

    def wait_late(*args: Any, **options: Any) -> tuple[str, ...]:
        nonlocal known_s
        time.sleep(0.5)
        missing = await_keys(*args, **options)
        known_s = time.monotonic()
        return missing

    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr(agreement_module, "await_keys", wait_late)
        with agreement.round():
            pass
    agreement.close()
    return time.monotonic() if group.rank == 0 else known_s


def test_the_leader_ends_after_the_others_know_the_decision() -> None:
    """It may serve the store, which ends with its process."""
    leader_s, other_s = on_ranks(_leave_late, 2)
    assert leader_s > other_s > 0


def _fail_where_others_hear(group: Group, what: str) -> list[str]:
    """Rank 2 fails before rank 1 hears it. Return the errors of all ranks, and whether the messages were heard."""
    agreement = Agreement(group.store, rank=group.rank, size=group.size, timeout_s=TIMEOUT_S)
    texts = []
    for fails in (True, False):
        try:
            with agreement.round() as ranks:
                if group.rank == 2 and fails:
                    raise CheckpointError(what)
                if group.rank == 2:
                    ranks.tell({"from": 2})
                if group.rank == 1:
                    assert ranks.hear([2]) == [{"from": 2}]
            texts.append("")
        except CheckpointError as error:
            texts.append(error.what)
    return texts


def test_an_error_that_another_rank_hears_names_the_rank_where_it_happened_once() -> None:
    texts = on_ranks(_fail_where_others_hear, 3, "rank files are missing")
    assert texts == [["rank 2: rank files are missing", ""]] * 2 + [["rank files are missing", ""]]


# -- values of any size -----------------------------------------------------------------------------------------


class Spying(DurableFS):
    """Notes the largest decision in the store while rank 1's tensors are written."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group, self.largest = group, 0

    def before(self, operation: str, path: Path) -> None:
        if operation == "create" and path.name == "__1_0.distcp":
            store = self._group.store
            sizes = [len(store.get(key)) for key in store.list_keys() if "/chosen" in key]
            self.largest = max(self.largest, *sizes)


def _save_much(group: Group, directory: Path) -> tuple[int, int]:
    fs = Spying(group)
    extra, rank_extra = {"ledger": noise(9, 9)}, {"mine": noise(group.rank, 9)}
    state = {f"{number} {noise(number, 1 / 32)}": torch.full((2,), float(number)) for number in range(300)}
    with open_manager(group, directory, fs=fs) as manager:
        manager.save(1, state, extra=extra, rank_extra=rank_extra)
        for tensor in state.values():
            tensor.zero_()
        resumed = manager.resume(state)
    assert resumed is not None and resumed.extra == extra
    assert resumed.rank_extras == [{"mine": noise(rank, 9)} for rank in range(group.size)]
    assert [tensor[0].item() for tensor in state.values()] == list(range(300))
    group.barrier()
    left = len([key for key in group.store.list_keys() if "/round" in key and "/beat" not in key])
    group.barrier()
    return fs.largest, left


def test_entries_and_extras_above_8_mib_are_saved_and_extras_are_not_sent_to_all_ranks(tmp_path: Path) -> None:
    largest, left = on_ranks(_save_much, 2, tmp_path)[1]
    assert 0 < largest < 1 << 16
    assert left == 4, "the last round's: two messages, the decision, and the end"


# -- a rank fails to save ---------------------------------------------------------------------------------------


class Custom:
    """A value in need of a pickle."""


class Stingy(CpuBackend):
    """Has no host memory to lock, when told so."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.locks = True

    def register_host_memory(self, memory: torch.Tensor) -> None:
        if not self.locks:
            raise RuntimeError("no memory can be locked")


def _bad_calls(backend: Stingy) -> list[Callable[[], dict[str, Any]]]:
    """Return functions for the arguments of ``save``; each call fails before the ranks meet."""
    model = torch.nn.Linear(4, 4)
    offloader = Offloader(model, backend=BACKEND)

    def no_memory() -> dict[str, Any]:
        backend.locks = False
        return {"state": {"weight": torch.ones(99)}}

    def offloaded() -> dict[str, Any]:
        state = model.state_dict()
        offloader.offload()
        return {"state": state}

    return [
        lambda: {"rank_extra": {"a": object()}},
        lambda: {"extra": {"a": (1, 2)}},
        lambda: {"state": {"odd": Custom()}},
        lambda: {"state": {"a": {"b": 1}, "a.b": 2}},
        lambda: {"weight_version": None},
        offloaded,
        no_memory,
    ]


def _fail_on_one(group: Group, directory: Path, victim: int, async_save: bool) -> list[str]:
    texts, backend = [], Stingy()
    with open_manager(group, directory, backend=backend, async_save=async_save) as manager:
        for number, bad in enumerate(_bad_calls(backend)):
            step = 2 * number + 1
            began_s = time.monotonic()
            call: dict[str, Any] = {"state": {"weight": torch.ones(3)}}
            failed = None
            try:
                manager.save(step, **(call | bad() if group.rank == victim else call))
                manager.wait()
            except HwrlError as exc:
                failed = exc
            assert time.monotonic() - began_s < TIMEOUT_S / 2, "it did not wait for a rank that is lost"
            backend.locks = True
            if failed is not None:
                texts.append(f"{type(failed).__name__}: {failed.what}")
            manager.save(step + 1, **call)
            manager.wait()
    return texts


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_what_fails_on_one_rank_before_the_ranks_meet_fails_on_all_and_the_next_save_works(
    tmp_path: Path, victim: int, async_save: bool
) -> None:
    texts = on_ranks(_fail_on_one, 2, tmp_path, victim, async_save)
    local, told = texts[victim], texts[1 - victim]
    assert len(local) == len(told) == 7
    assert [info.step for info in find_checkpoints(tmp_path)[0]] == list(range(2, 15, 2))
    assert local[5].startswith("MemoryStateError"), "as it is where it happened"
    assert all(one.startswith("CheckpointSaveError") for one in told)


class Interrupted(BaseException):
    """Raised by a signal's handler."""


class Interrupting(CpuBackend):
    """Is interrupted when it first locks memory, to stage a state."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self._interrupts = True

    def register_host_memory(self, memory: torch.Tensor) -> None:
        if self._interrupts:
            self._interrupts = False
            raise Interrupted


def _save_on_and_on(group: Group, directory: Path, interrupts: bool) -> list[str]:
    """Save six steps without a ``wait`` between them; rank 1 cannot take part in the first."""
    said, backend = [], Interrupting() if group.rank == 1 and interrupts else BACKEND
    with open_manager(group, directory, backend=backend, async_save=True) as manager:
        for step in range(1, 7):
            bad = {"odd": Custom()} if (group.rank, step, interrupts) == (1, 1, False) else {}
            began_s = time.monotonic()
            try:
                manager.save(step, {"weight": torch.full((3,), float(step))} | bad)
                said.append("")
            except (HwrlError, Interrupted) as exc:
                said.append(type(exc).__name__)
            assert time.monotonic() - began_s < TIMEOUT_S / 2, "it waited for a rank that is elsewhere"
    return said


@pytest.mark.parametrize(("interrupts", "at_once"), [(False, "CheckpointSaveError"), (True, "Interrupted")])
def test_saves_in_the_background_go_on_after_one_that_a_rank_could_not_begin(
    tmp_path: Path, interrupts: bool, at_once: str
) -> None:
    told, local = on_ranks(_save_on_and_on, 2, tmp_path, interrupts)
    assert local == [at_once, "", "", "", "", ""]
    assert told == ["", "CheckpointSaveError", "", "", "", ""]
    assert [info.step for info in find_checkpoints(tmp_path)[0]] == [2, 3, 4, 5, 6]


# -- names of some ranks ----------------------------------------------------------------------------------------


def _own_names(group: Group, value: float) -> dict[str, Any]:
    """Return a stage of a pipeline: values of all ranks, and values of this one."""
    return {"model": {f"layers.{group.rank}": torch.full((2,), float(value + group.rank))}, "step": int(value)}


def _save_and_resume_own_names(group: Group, directory: Path) -> list[str]:
    with open_manager(group, directory) as manager:
        manager.save(1, _own_names(group, 5))
        state = _own_names(group, -9)
        assert manager.resume(state) is not None
        assert state["model"][f"layers.{group.rank}"].tolist() == [5.0 + group.rank] * 2 and state["step"] == 5
        texts = []
        other: dict[str, Any] = {"model": {"layers.0": torch.full((2,), -9.0)}, "step": -9}
        wider = _own_names(group, -9) | ({"new": torch.zeros(1)} if group.rank == 0 else {})
        for template in (other, wider):
            with pytest.raises(CheckpointError) as caught:
                manager.resume(template)
            texts.append(caught.value.why)
            assert template["model"][min(template["model"])].tolist()[0] < 0, "nothing is loaded on any rank"
    return texts


def test_names_that_only_some_ranks_have_are_resumed_by_them_and_missed_if_no_rank_has_them(tmp_path: Path) -> None:
    for unknown, missing in on_ranks(_save_and_resume_own_names, 2, tmp_path):
        assert unknown == "the state lacks 1 of the checkpoint's names, for example 'model.layers.1'"
        assert missing == "the checkpoint lacks 1 of the state's names, for example 'new'"


def _give_torchs_group(group: Group, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"ProcessGroup.* is not allowed"):
        open_manager(dist.group.WORLD, directory)  # type: ignore[arg-type]  # is refused
    open_manager(Comm(BACKEND).default_group(), directory).close()


def test_torchs_own_group_is_refused_and_the_call_that_is_named_helps(tmp_path: Path) -> None:
    on_ranks(_give_torchs_group, 2, tmp_path)


def _fail_twice(group: Group, directory: Path) -> list[str]:
    unsavable: Any = {"weight": torch.ones(4), "custom": Custom()}, 3
    return [_fail_again(group, directory / str(number), state) for number, state in enumerate(unsavable)]


def _fail_again(group: Group, directory: Path, unsavable: Any) -> str:
    """The save of step 1 fails on all ranks, in the background. Then rank 0 cannot capture step 2."""
    with open_manager(group, directory, async_save=True, fs=FullOnce(group.rank)) as manager:
        manager.save(1, {"weight": torch.ones(4)})
        with pytest.raises(CheckpointSaveError) as caught:
            manager.save(2, unsavable if group.rank == 0 else {})
        with contextlib.suppress(CheckpointSaveError):  # rank 1 also learns of rank 0's error
            manager.wait()
    return "\n".join([caught.value.what, *getattr(caught.value, "__notes__", [])])


def test_the_error_of_the_last_save_is_noted_on_a_newer_one(tmp_path: Path) -> None:
    newer, pending = on_ranks(_fail_twice, 2, tmp_path)
    for text, what in zip(newer, ("state 'custom' cannot be saved", "step 2 was not saved"), strict=True):
        assert what in text and "The previous save failed, too: step 1 was not saved" in text
    assert all("step 1 was not saved" in text for text in pending)


# -- a resume ---------------------------------------------------------------------------------------------------


def _resume_after_a_failed_save(group: Group, directory: Path) -> tuple[str, int]:
    """Rank 0 waits for the failed save; rank 1 hears of it in ``resume``."""
    state = {"weight": torch.ones(4) * group.rank}
    with open_manager(group, directory, async_save=True, fs=FullOnce(group.rank)) as manager:
        manager.save(1, state)
        if group.rank == 0:
            with pytest.raises(CheckpointSaveError):
                manager.wait()
        begin_s = time.monotonic()
        with pytest.raises(CheckpointSaveError) as caught:
            manager.resume(state)
        assert time.monotonic() - begin_s < TIMEOUT_S / 2
        manager.save(2, state)
        resumed = manager.resume(state)
        assert resumed is not None
    return str(caught.value), resumed.step


class FullOnce(DurableFS):
    """Rank 1 cannot write step 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def before(self, operation: str, path: Path) -> None:
        if self.rank == 1 and "global_step_1." in str(path):
            raise OSError(28, "no room", str(path))


def test_a_previous_failure_raised_by_the_resume_of_one_rank_ends_that_of_all(tmp_path: Path) -> None:
    for text, step in on_ranks(_resume_after_a_failed_save, 2, tmp_path):
        assert "step 1 was not saved" in text and step == 2


def _resume_unreadable(group: Group, directory: Path) -> str:
    state = {"weight": torch.ones(4)}
    calls = 0

    def inspect_until_verified(path: Path) -> CheckpointInfo:
        nonlocal calls
        calls += 1
        if group.rank == 1 and calls == 2:
            raise corrupt_error(path, "the disk is gone")
        return inspect_checkpoint(path)

    with open_manager(group, directory) as manager, pytest.MonkeyPatch.context() as patch:
        manager.save(1, state)
        patch.setattr(resume, "inspect_checkpoint", inspect_until_verified)
        begin_s = time.monotonic()
        with pytest.raises(CheckpointCorruptError) as caught:
            manager.resume(state)
        assert time.monotonic() - begin_s < TIMEOUT_S / 2
    return str(caught.value)


def test_a_manifest_that_one_rank_cannot_read_after_the_verification_fails_the_resume_on_all(tmp_path: Path) -> None:
    assert all("the disk is gone" in text for text in on_ranks(_resume_unreadable, 2, tmp_path))
