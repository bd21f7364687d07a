"""``hwrl bench checkpoint``: what an asynchronous save costs the trainer, beside other packages' ways of saving."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hwrl.cli.arguments import add_json, folder, positive_float, positive_int, seconds, write_json
from hwrl.cli.bench_checkpoint_ways import WAYS, Plan, serve
from hwrl.errors import HwrlError

HELP = "asynchronous saves against torch's and megatron-core's: time blocked, the next step, host memory"

_SAMPLE_S = 0.05
_END_S = 30.0
_MEASURED = ("raw_s", "step_s", "blocked_s", "next_step_s", "complete_s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--gib", type=positive_float, default=0.3, help="the state, GiB: parameters are a third, the rest AdamW's"
    )
    parser.add_argument("--rounds", type=positive_int, default=3, help="measurements of each way (default 3)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=f"of: {', '.join(WAYS)}"
    )
    parser.add_argument(
        "--offload", choices=("none", "optimizer", "all"), default="none", help="what is on the host (default none)"
    )
    parser.add_argument(
        "--staging", choices=("host", "device"), default="host", help="where hwrl copies what is not (default host)"
    )
    parser.add_argument("--tokens", type=positive_int, default=2048, help="tokens of a training step (default 2048)")
    parser.add_argument("--rollout-s", type=seconds, default=0.0, help="idle seconds between save and step (default 0)")
    parser.add_argument("--dir", type=folder, help="where to save, on a disk or tmpfs (default: for temporary files)")
    parser.add_argument("--timeout", type=positive_float, default=75.0, help="seconds for all of one way (default 75)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each way in a process of its own, print a table, write the JSON; fail if hwrl could not be measured."""
    ways: dict[str, Any] = {}
    for name in args.ways:
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="hwrl-bench-") as directory:
            plan = _plan(args, Path(directory))
            why_not = WAYS[name].why_not(plan)
            ways[name] = {"why_not": why_not} if why_not else _measure(name, plan, args.rounds, timeout_s=args.timeout)
    result = _result(args, ways)
    print(_table(result))
    write_json(args.json, result)
    return 0 if all("why_not" not in found for name, found in ways.items() if name == "hwrl") else 1


def _plan(args: argparse.Namespace, directory: Path) -> Plan:
    return Plan(int(args.gib * (1 << 30)), args.offload, args.tokens, args.rollout_s, args.staging, directory)


# -- one way -------------------------------------------------------------------------------------------------------


def _measure(name: str, plan: Plan, rounds: int, *, timeout_s: float) -> dict[str, Any]:
    """Return the figures of one way, of fewer rounds if the time was over before the last, or why there are none."""
    measured: list[dict[str, float]] = []
    try:
        with _Process(name, plan, timeout_s=timeout_s) as process:
            payload = process.answer()
            with process.memory() as alone:
                process.ask("step")
            with process.memory() as saving:
                process.ask("save")
            while len(measured) < rounds:
                measured.append(process.ask("measure"))
    except HwrlError as exc:
        if not measured:
            return {"why_not": exc.why}
    return {**payload, **_extra(alone, saving), **_figures(measured)}


class _Process:
    """The process of one way, asked over a pipe. Nothing that it started outlives the context."""

    def __init__(self, name: str, plan: Plan, *, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # a way may start processes, so it is no daemon
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(self._theirs, name, plan))
        self._timeout_s = timeout_s

    def __enter__(self) -> _Process:
        self._deadline = time.monotonic() + self._timeout_s
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self._pipe.send("end")
            self._process.join(_END_S)
        with contextlib.suppress(ProcessLookupError):  # before it has a session of its own
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None, "started"
        return self._process.pid

    def ask(self, what: str) -> Any:
        """Return the answer; HwrlError if there is none."""
        with contextlib.suppress(BrokenPipeError):  # it ended: then there is no answer either
            self._pipe.send(what)
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        if not self._pipe.poll(max(0.0, self._deadline - time.monotonic())):
            raise _no_answer(f"it took longer than {self._timeout_s:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(_END_S)
            raise _no_answer(f"its process ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise _no_answer(answer)
        return answer

    @contextlib.contextmanager
    def memory(self) -> Iterator[dict[str, int]]:
        """Sample, while the block runs, what all processes of the way hold; the dict has the peaks afterwards."""
        peaks = _host_memory(self._pid)
        done = threading.Event()

        def sample() -> None:
            while not done.wait(_SAMPLE_S):
                for key, nbytes in _host_memory(self._pid).items():
                    peaks[key] = max(peaks[key], nbytes)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield peaks
        finally:
            done.set()
            thread.join()


def _no_answer(why: str) -> HwrlError:
    return HwrlError("a way was not measured", why=why, fix="see what it printed")


def _host_memory(session: int) -> dict[str, int]:
    """Return the bytes of memory that the processes of ``session`` hold, and those that the machine lacks.

    Proportional set size: a page that several processes map counts once among them, shared memory as well.
    """
    held = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                held += _field(entry / "smaps_rollup", "Pss:")
    meminfo = Path("/proc/meminfo")
    return {"held_nbytes": held, "machine_nbytes": _field(meminfo, "MemTotal:") - _field(meminfo, "MemAvailable:")}


def _field(path: Path, name: str) -> int:
    """Return the field in bytes."""
    lines = path.read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)


def _extra(alone: dict[str, int], saving: dict[str, int]) -> dict[str, int]:
    return {f"extra_{key}": saving[key] - alone[key] for key in alone}


def _figures(rounds: list[dict[str, float]]) -> dict[str, Any]:
    medians = {f"{name}_median": statistics.median(one[name] for one in rounds) for name in _MEASURED}
    return {
        **medians,
        "blocked_of_raw": medians["blocked_s_median"] / medians["raw_s_median"],
        "next_step_of_step": medians["next_step_s_median"] / medians["step_s_median"],
        "rounds": rounds,
    }


# -- the result ----------------------------------------------------------------------------------------------------


def _result(args: argparse.Namespace, ways: dict[str, Any]) -> dict[str, Any]:
    from hwrl.cli.provenance import provenance
    from hwrl.discovery import get_backend

    return {
        "benchmark": "checkpoint",
        "offload": args.offload,
        "staging": args.staging,
        "rollout_s": args.rollout_s,
        "ways": ways,
        "device": get_backend().info.description,
        **provenance("torch"),
    }


def _table(result: dict[str, Any]) -> str:
    measured = {name: found for name, found in result["ways"].items() if "why_not" not in found}
    lines = [f"{result['device']}, {result['hardware']['processor']} ({result['hardware']['cores']} cores)"]
    for found in list(measured.values())[:1]:
        size, staged = found["payload_nbytes"] / 1e6, found["staged_nbytes"] / 1e6
        lines.append(f"parameters and AdamW state: {size:.0f} MB, {staged:.0f} MB of it on the device")
        lines.append(f"hwrl copies that to the {result['staging']}'s memory before its save returns")
    lines.append(
        f"{'way':<20}{'raw ms':>10}{'blocked ms':>12}{'of raw':>8}{'step ms':>10}{'next ms':>10}{'ratio':>7}"
        f"{'saved s':>9}{'extra MB':>10}{'rounds':>8}"
    )
    for name, found in measured.items():
        raw, blocked, step, after = (found[f"{key}_s_median"] * 1e3 for key in ("raw", "blocked", "step", "next_step"))
        times = f"{raw:>10.1f}{blocked:>12.1f}{found['blocked_of_raw']:>8.2f}{step:>10.1f}{after:>10.1f}"
        rest = f"{found['next_step_of_step']:>7.2f}{found['complete_s_median']:>9.2f}"
        lines.append(f"{name:<20}{times}{rest}{found['extra_held_nbytes'] / 1e6:>10.0f}{len(found['rounds']):>8}")
    lines += [
        f"{name}: not measured: {found['why_not']}" for name, found in result["ways"].items() if "why_not" in found
    ]
    lines.append(
        "raw: the bytes on the device copied to pinned memory at once; extra: host memory of all its processes"
    )
    return "\n".join(lines)
