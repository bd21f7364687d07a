"""Run torch's own samples of every operator (OpInfo) on the simulated device and compare with the CPU.

``python sweep.py float32 bfloat16`` prints what does not pass, in the form of ``not_passing.txt``. The environment is
one that ``ci/npusim/build`` was run for, and has ``expecttest``.

An operator that is not simulated ends its process, so entries run in forked children: one that dies is replaced, and
the entry that it died of carries its last words.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401 - registers the device; not initialized before the fork
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_map

SAMPLES = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TIMEOUT_S = 60.0
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# The entries of random operators seed themselves before each call; here a second seed must give other numbers.
common_methods_invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
fork = multiprocessing.get_context("fork")


def entries(dtype: str) -> list[str]:
    """Names of the OpInfo entries that take ``dtype`` on the CPU."""
    return [name(op) for op in op_db if DTYPES[dtype] in op.dtypes]


def name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def sweep(dtype: str, names: Sequence[str], *, workers: int = 2) -> dict[str, str]:
    """Run the entries; the result maps those that do not pass to the reason, in one line."""
    shares = [names[i::workers] for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda share: _run_share(dtype, share), shares)
    return {entry: reason for share in results for entry, reason in share.items() if reason}


def _run_share(dtype: str, names: Sequence[str]) -> dict[str, str]:
    outcome: dict[str, str] = {}
    while len(outcome) < len(names):
        rest = names[len(outcome) :]
        with tempfile.TemporaryFile("w+") as words:
            receive, send = fork.Pipe(duplex=False)
            child = fork.Process(target=_child, args=(dtype, rest, send, words.fileno()), daemon=True)
            child.start()
            send.close()
            outcome |= zip(rest, _reasons(receive), strict=False)
            child.join(100.0)  # on a busy machine even the end of a process takes seconds
            child.kill()
            if child.exitcode != 0 and len(outcome) < len(names):
                words.seek(0)
                outcome[names[len(outcome)]] = (
                    _last_words(words.read()) or f"a crash, or no answer in {TIMEOUT_S:.0f} s"
                )
    return outcome


def _reasons(receive: Connection) -> Iterator[str]:
    """What the child reports, until it dies or an entry takes too long."""
    try:
        while receive.poll(TIMEOUT_S):
            yield receive.recv()
    except EOFError:
        return


def _last_words(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("npusim: ")]
    return lines[-1].removeprefix("npusim: ") if lines else ""


def _child(dtype: str, names: Iterable[str], send: Connection, stderr: int) -> None:
    os.dup2(stderr, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ops = {name(op): op for op in op_db}
    for entry in names:
        reason = check(ops[entry], DTYPES[dtype])
        send.send(reason)
        if reason:
            break  # what failed may have left the device's stream failed: another child goes on
    send.close()
    os._exit(0)


def check(op: OpInfo, dtype: torch.dtype) -> str:
    """Why the operator does not pass on the device, in one line; empty if it does."""
    try:
        for sample in itertools.islice(_samples(op, dtype), SAMPLES):
            _compare(op, sample)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the entry's outcome
        return " ".join(f"{type(error).__name__}: {error}".split())[:1600]
    return ""


def _samples(op: OpInfo, dtype: torch.dtype) -> Iterator[SampleInput]:
    torch.manual_seed(0)
    return iter(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype in op.backward_dtypes))


def _compare(op: OpInfo, sample: SampleInput) -> None:
    expected = _outputs_and_grads(op, sample, "cpu")
    result = _outputs_and_grads(op, sample, "npu")
    random = _is_random(op, sample, expected)
    if random:
        torch.testing.assert_close(_outputs_and_grads(op, sample, "npu"), result, rtol=0, atol=0, equal_nan=True)
    if random or op.name in UNINITIALIZED:
        expected, result = tree_map(lambda t: t.shape, (expected, result))
        assert expected == result, f"shapes {result}, on the CPU {expected}"
    else:
        tight = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
        for ours, cpu in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, cpu, equal_nan=True, **tight.get(cpu.dtype, {}))


def _is_random(op: OpInfo, sample: SampleInput, first: list[torch.Tensor]) -> bool:
    if op.name in UNINITIALIZED:
        return False
    second = _outputs_and_grads(op, sample, "cpu", seed=1)
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def _outputs_and_grads(op: OpInfo, sample: SampleInput, device: str, *, seed: int = 0) -> list[torch.Tensor]:
    """The tensors that come out, then the gradients of the inputs, all on the CPU."""

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach().clone().to(device).requires_grad_(value.requires_grad)
            leaves.append(value)
        return torch.device(device) if isinstance(value, torch.device) or value == "cpu" else value

    leaves: list[torch.Tensor] = []
    arguments, keywords = tree_map(place, ((sample.input, *sample.args), dict(sample.kwargs)))
    if "device" in keywords:
        keywords["device"] = device
    torch.manual_seed(seed)
    function: Callable[..., Any] = op.op
    result = sample.output_process_fn_grad(function(*arguments, **keywords))
    outputs = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    grads = _grads([t for t in outputs if t.requires_grad], [t for t in leaves if t.requires_grad])
    return [t.detach().cpu() for t in (*outputs, *grads)]


def _grads(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    if not outputs or not leaves:
        return []
    found = torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
    return [grad for grad in found if grad is not None]


def expected_failures() -> dict[tuple[str, str], str]:
    """``not_passing.txt``: lines of dtype, entry, reason."""
    lines = (Path(__file__).parent / "not_passing.txt").read_text().splitlines()
    fields = [line.split(maxsplit=2) for line in lines if line and not line.startswith("#")]
    return {(dtype, entry): reason for dtype, entry, reason in fields}


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        for failed, why in sorted(sweep(chosen, entries(chosen)).items()):
            print(chosen, failed, why)
