"""``hwrl bench overhead``: what a call of hwrl costs beside torch's own for the same thing, on the chosen backend."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwrl.cli.arguments import add_json, positive_int, write_json

if TYPE_CHECKING:
    from hwrl.interfaces import Backend

HELP = "a call of hwrl against torch's own, on this machine"

LIMIT_NS = 1000.0
"""The aim: no call costs more than this beside torch's own."""

_BLOCKS = 20  # the two sides of a call take turns, so that a busy machine disturbs both


@dataclass(frozen=True)
class Call:
    """One call in both ways; ``theirs`` is None where torch has none for the device."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any] | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--calls", type=positive_int, default=20_000, help="measured calls of each kind (default 20000)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON."""
    from hwrl.discovery import get_backend

    backend = get_backend()
    calls = (*_device_calls(backend), *_group_calls(backend))
    result = _result(args, {call.name: _measure(call, args.calls) for call in calls}, str(backend.device()))
    print(_table(result))
    write_json(args.json, result)
    return 0


# -- the calls -----------------------------------------------------------------------------------------------------


def _device_calls(backend: Backend) -> list[Call]:
    import torch

    kind = backend.info.device_type
    module = torch.get_device_module(kind)
    event, stream = backend.event(), backend.current_stream()

    def device() -> torch.device:
        return torch.device(kind, module.current_device())

    def memory() -> tuple[Any, ...]:
        used = module.memory_allocated(), module.memory_reserved(), module.max_memory_allocated()
        return (*module.mem_get_info(), *used)

    has_streams, has_memory = hasattr(module, "default_stream"), hasattr(module, "mem_get_info")
    return [
        Call("device()", backend.device, device if has_streams else None),
        Call("current_stream()", backend.current_stream, module.current_stream),
        Call("event()", backend.event, torch.Event if has_streams else None),
        Call("record_event(event)", lambda: stream.record_event(event), event.record if has_streams else None),
        Call("event.query()", event.query, None),
        Call("range()", lambda: backend.range("overhead"), lambda: torch.profiler.record_function("overhead")),
        Call("memory_info()", backend.memory_info, memory if has_memory else None),
        Call("synchronize()", backend.synchronize, module.synchronize),
    ]


class _NoLibrary:
    """A process group of one whose operations are done at once: a real one's time varies by more than hwrl adds."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def broadcast(self, *_: Any) -> _NoLibrary:
        return self

    allreduce = _allgather_base = broadcast

    def wait(self) -> None:
        """Return at once."""

    synchronize = wait


def _group_calls(backend: Backend) -> list[Call]:
    import torch

    from hwrl.comm import HashStore, TorchGroup

    raw: Any = _NoLibrary()
    group, await_work = TorchGroup(backend, raw, name="overhead", store=HashStore()), backend.await_work
    tensor = torch.zeros(2, 2, device=backend.device())
    flat, whole = tensor.view(-1), tensor.view(-1).clone()
    return [
        Call("Group.broadcast", lambda: group.broadcast(tensor, src=0), lambda: await_work(raw.broadcast(tensor, 0))),
        Call("Group.all_reduce", lambda: group.all_reduce(tensor), lambda: await_work(raw.allreduce(tensor))),
        Call(
            "Group.all_gather",
            lambda: group.all_gather(whole, flat),
            lambda: await_work(raw._allgather_base(whole, flat)),
        ),
    ]


def _measure(call: Call, calls: int) -> dict[str, float | None]:
    """Return nanoseconds a call, the median over blocks of calls that take turns."""
    count = max(1, calls // _BLOCKS)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(_BLOCKS + 1):  # the first warms up
        ours.append(_block_ns(call.ours, count))
        if call.theirs is not None:
            theirs.append(_block_ns(call.theirs, count))
    ours_ns = statistics.median(ours[1:])
    if call.theirs is None:
        return {"hwrl_ns": ours_ns, "torch_ns": None, "more_ns": None}
    torch_ns = statistics.median(theirs[1:])
    more_ns = statistics.median(one - other for one, other in zip(ours[1:], theirs[1:], strict=True))
    return {"hwrl_ns": ours_ns, "torch_ns": torch_ns, "more_ns": more_ns}


def _block_ns(call: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begin) / count


# -- the result ----------------------------------------------------------------------------------------------------


def _result(args: argparse.Namespace, measured: dict[str, Any], device: str) -> dict[str, Any]:
    from hwrl.cli.provenance import provenance

    over = [name for name, found in measured.items() if found["more_ns"] is not None and found["more_ns"] > LIMIT_NS]
    return {
        "benchmark": "overhead",
        "calls": args.calls,
        "measured": measured,
        "limit_ns": LIMIT_NS,
        "over_the_limit": over,
        "device": device,
        **provenance("torch"),
    }


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, {result['hardware']['processor']} ({result['hardware']['cores']} cores)"]
    lines.append(f"{'call':<22}{'hwrl ns':>10}{'torch ns':>10}{'more ns':>10}")
    for name, found in result["measured"].items():
        cells = [found[key] for key in ("hwrl_ns", "torch_ns", "more_ns")]
        lines.append(f"{name:<22}" + "".join(f"{'-' if cell is None else format(cell, '.0f'):>10}" for cell in cells))
    over = ", ".join(result["over_the_limit"])
    lines.append(f"over {LIMIT_NS:.0f} ns more: {over or 'none'}")
    return "\n".join(lines)
