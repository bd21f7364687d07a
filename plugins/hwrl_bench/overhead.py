"""``hwrl bench overhead``: the time of a call of hwrl beside torch's call for the same, on the chosen backend."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hwrl import get_backend
from hwrl_bench.arguments import add_json, positive_int
from hwrl_bench.result import machine_line, provenance, report
from hwrl_bench.ways import BenchPlan

if TYPE_CHECKING:
    from hwrl import Backend

HELP = "a call of hwrl against torch's own, on this machine"

LIMIT_NS = 1000.0
"""The aim: no call takes more than this beside torch's."""

_BLOCKS = 20


@dataclass(frozen=True)
class ComparedCall:
    """A call of hwrl and torch's call for the same; ``torch`` is None if torch has none for the device."""

    name: str
    hwrl: Callable[[], Any]
    torch: Callable[[], Any] | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--calls", type=positive_int, default=20_000, help="measured calls of each kind (default 20000)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON."""
    backend = get_backend()
    calls = (*_device_calls(backend), *_group_calls(backend))
    result = _result(args, {call.name: _measure(call, args.calls) for call in calls}, str(backend.device()))
    report(result, _table(result), json_path=args.json)
    return 0


# -- the calls -----------------------------------------------------------------------------------------------------


def _device_calls(backend: Backend) -> list[ComparedCall]:
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
        ComparedCall("device()", backend.device, device if has_streams else None),
        ComparedCall("current_stream()", backend.current_stream, getattr(module, "current_stream", None)),
        ComparedCall("event()", backend.event, torch.Event if has_streams else None),
        ComparedCall("record_event(event)", lambda: stream.record_event(event), event.record if has_streams else None),
        ComparedCall("event.query()", event.query, None),
        ComparedCall("range()", lambda: backend.range("overhead"), lambda: torch.profiler.record_function("overhead")),
        ComparedCall("memory_info()", backend.memory_info, memory if has_memory else None),
        ComparedCall("synchronize()", backend.synchronize, getattr(module, "synchronize", None)),
    ]


class _InstantGroup:
    """A process group of one with operations that take no time. Those of a real library vary by more than hwrl adds."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def broadcast(self, *_: Any) -> _InstantGroup:
        return self

    allreduce = _allgather_base = broadcast

    def wait(self, *_: timedelta) -> None:
        """Return at once."""

    synchronize = wait


def _group_calls(backend: Backend) -> list[ComparedCall]:
    import torch

    from hwrl.comm import Group, HashStore

    raw: Any = _InstantGroup()
    group, await_work = Group(backend, raw, name="overhead", store=HashStore()), backend.await_work
    tensor = torch.zeros(2, 2, device=backend.device())
    flat, whole = tensor.view(-1), tensor.view(-1).clone()

    def broadcast() -> None:
        await_work(raw.broadcast(tensor, 0))

    def all_reduce() -> None:
        await_work(raw.allreduce(tensor))

    def all_gather() -> None:
        await_work(raw._allgather_base(whole, flat))

    return [
        ComparedCall("Group.broadcast", lambda: group.broadcast(tensor, src=0), broadcast),
        ComparedCall("Group.all_reduce", lambda: group.all_reduce(tensor), all_reduce),
        ComparedCall("Group.all_gather", lambda: group.all_gather(whole, flat), all_gather),
    ]


def _measure(call: ComparedCall, calls: int) -> dict[str, float | None]:
    """Return nanoseconds a call, the medians over blocks of calls."""
    count = max(1, calls // _BLOCKS)
    sides = {"hwrl": call.hwrl} | ({} if call.torch is None else {"torch": call.torch})
    plan = BenchPlan(tuple(sides), rounds=_BLOCKS, warm_up=1)
    ns = plan.take_turns(lambda side, _: _block_ns(sides[side], count))
    hwrl_ns = statistics.median(ns["hwrl"])
    if call.torch is None:
        return {"hwrl_ns": hwrl_ns, "torch_ns": None, "more_ns": None}
    more_ns = statistics.median(one - other for one, other in zip(ns["hwrl"], ns["torch"], strict=True))
    return {"hwrl_ns": hwrl_ns, "torch_ns": statistics.median(ns["torch"]), "more_ns": more_ns}


def _block_ns(call: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begin) / count


# -- the result ----------------------------------------------------------------------------------------------------


def _result(args: argparse.Namespace, measured: dict[str, Any], device: str) -> dict[str, Any]:
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
    lines = [machine_line(result)]
    lines.append(f"{'call':<22}{'hwrl ns':>10}{'torch ns':>10}{'more ns':>10}")
    for name, found in result["measured"].items():
        cells = [found[key] for key in ("hwrl_ns", "torch_ns", "more_ns")]
        lines.append(f"{name:<22}" + "".join(f"{'-' if cell is None else format(cell, '.0f'):>10}" for cell in cells))
    over = ", ".join(result["over_the_limit"])
    lines.append(f"over {LIMIT_NS:.0f} ns more: {over or 'none'}")
    return "\n".join(lines)
