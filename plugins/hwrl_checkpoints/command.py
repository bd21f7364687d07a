"""``hwrl checkpoints``: list, verify, export, join and prune the checkpoints of a run, also while it runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.cli import local_path
from hwrl.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ConfigError, DataError
from hwrl.files import read_file

if TYPE_CHECKING:
    import torch

    from hwrl.checkpoint import CheckpointInfo, Skipped

HELP = "list, verify, export, join or prune the checkpoints of a run"

_MAX_TRACKER_NBYTES = 1000
_SUBDIRECTORY = "checkpoints"
"""Where a run's directory has its checkpoints."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, metavar="{ls,verify,export,join,prune}")
    _add(actions, "ls", _list, "show the checkpoints in DIR, and the process that writes there")
    verify = _add(
        actions,
        "verify",
        _verify,
        "read every file and compare its hash; status 1 if one differs, or if there is no checkpoint",
    )
    verify.add_argument("--step", type=int, help="only this step")
    export = _add(actions, "export", _export, "write a checkpoint's model, or adapter, for from_pretrained")
    export.add_argument("out", type=local_path, metavar="OUT", help="the directory to write; it must not exist")
    export.add_argument("--model", type=local_path, required=True, help="the model directory at the start of training")
    export.add_argument("--step", type=int, help="default: the newest")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    export.add_argument("--dtype", default="float32", choices=dtypes, help="default: float32, as trained")
    join = _add(actions, "join", _join, "put together the parts of nodes with disks of their own")
    join.add_argument("more", type=local_path, nargs="+", metavar="DIR", help="the same directory of the other nodes")
    join.add_argument("--out", type=local_path, required=True, help="the directory to write global_step_N/ into")
    join.add_argument("--step", type=int, help="default: the newest with all parts")
    prune = _add(actions, "prune", _prune, "remove all complete checkpoints but the newest; not while a trainer runs")
    prune.add_argument("--keep", type=int, required=True, help="how many to keep, at least 1")


def run(args: argparse.Namespace) -> int:
    """Run the action on ``args.dir``, or on the ``checkpoints/`` in it; return 1 if a verified checkpoint is bad."""
    args.dir = _checkpoints_in(args.dir, or_owner=args.action is _list)
    action: Callable[[argparse.Namespace], tuple[dict[str, Any], list[str], bool]] = args.action
    report, lines, ok = action(args)
    print(json.dumps({"directory": str(args.dir), **report}, indent=2) if args.json else "\n".join(lines))
    return 0 if ok else 1


def _checkpoints_in(directory: Path, *, or_owner: bool = False) -> Path:
    """Return ``directory``, or the ``checkpoints/`` in it if ``directory`` itself has no step.

    Raises CheckpointNotFoundError if hwrl never saved there. With ``or_owner``, a running writer is enough.
    """
    from hwrl.checkpoint import broken_checkpoints, find_checkpoints, unfinished_saves

    found, inner = directory, directory / _SUBDIRECTORY
    if inner.is_dir() and not any(find_checkpoints(directory)):
        found = inner
    has_saves = found.is_dir() and any([*find_checkpoints(found), unfinished_saves(found), broken_checkpoints(found)])
    if not has_saves and not (or_owner and _owner(found)):
        raise _no_checkpoint_error(found)
    return found


def _owner(directory: Path) -> str | None:
    """Return the writer of ``directory``, as a sentence: for a run's checkpoints, the process that leads the run."""
    from hwrl.checkpoint import find_owner

    run = [directory.parent] if directory.name == _SUBDIRECTORY and directory.is_dir() else []
    return next(filter(None, map(find_owner, [*run, directory])), None)


def _no_checkpoint_error(directory: Path, reasons: Sequence[str] = ()) -> CheckpointNotFoundError:
    """Return the error for a ``directory`` without a complete checkpoint. ``reasons`` are about the incomplete ones."""
    absent = "it is a file" if directory.exists() else "there is no such directory"
    why = "; ".join(reasons) or ("nothing was saved there" if directory.is_dir() else absent)
    what, fix = "holds no checkpoint", "give the directory of a run, or the one that has global_step_N/"
    if reasons:
        what, fix = "holds no complete checkpoint", "restore one from a copy"
    owner = _owner(directory)
    if owner is not None:
        why, fix = f"{why}; {owner}", "wait for its next save (checkpoint.save_every_steps), or its end"
    return CheckpointNotFoundError(f"{directory} {what}", why=why, fix=fix)


def _add(actions: Any, name: str, action: Callable[..., object], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument(
        "dir", type=local_path, metavar="DIR", help="a run's directory, or the one that holds global_step_N/"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.set_defaults(action=action)
    return parser


def _list(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    from hwrl.checkpoint import TRACKER_NAME, broken_checkpoints, unfinished_saves

    complete, skipped = _find(args)
    path, unfinished, aside = args.dir / TRACKER_NAME, unfinished_saves(args.dir), broken_checkpoints(args.dir)
    owner, tracker = _owner(args.dir), None
    if os.path.lexists(path):
        try:
            tracker = read_file(path, max_nbytes=_MAX_TRACKER_NBYTES).decode(errors="replace")
        except OSError as exc:
            tracker = f"nothing, because {exc.strerror}"
    report = {
        "owner": owner,
        "tracker": tracker,
        "checkpoints": [_describe(info) for info in complete],
        "incomplete": [{"path": str(one.path), "reason": one.reason} for one in skipped],
        "unfinished": [str(path) for path in unfinished],
        "set_aside": [str(path) for path in aside],
    }
    tracker_text = "there is no tracker yet" if tracker is None else f"the tracker says {tracker}"
    lines = [
        f"  step {info.step:<8} {info.nbytes / 1e6:12,.1f} MB  {info.manifest.world_size} rank(s)  "
        f"weight version {info.weight_version:<6} {_saved_at(info)}{_part(info)}{_prompts(info)}"
        for info in complete
    ]
    lines += [f"  {one.path.name} is not complete: {one.reason}" for one in skipped]
    lines += [f"  {path.name}: a save that runs, or was interrupted" for path in unfinished]
    lines += [f"  {path.name}: put aside, because it could not be resumed; look at it and remove it" for path in aside]
    header = f"{args.dir}: {owner or 'nobody writes here now'}; {tracker_text}"
    return report, [header, *(lines or ["  nothing was saved yet"])], True


def _verify(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    from hwrl.checkpoint import hold_for_reading, verify_files

    complete, skipped = _find(args)
    broken = {one.path.name: one.reason for one in skipped}
    for info in complete:
        try:
            with hold_for_reading(info):
                verify_files(info, info.manifest.files)
        except CheckpointCorruptError as exc:
            if info.path.exists():  # otherwise the trainer has removed it meanwhile
                broken[info.path.name] = exc.why
    whole = [info.step for info in complete if info.path.exists() and info.path.name not in broken]
    parts = {info.step: _part(info) for info in complete}
    lines = [f"step {step} is whole{parts[step]}" for step in whole] + [
        f"{name}: {why}" for name, why in broken.items()
    ]
    if not lines:
        raise _no_checkpoint_error(args.dir)
    return {"whole": whole, "broken": broken}, lines, not broken


def _export(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    from hwrl.checkpoint import EXTRA_NAME, corrupt_error, hold_for_reading, read_extra, read_tensors, verify_files

    if args.out.exists():
        raise ConfigError(f"{args.out} exists", why="nothing is overwritten", fix="choose another directory")
    info = _complete(args)[-1]
    if info.manifest.nodes > 1:
        raise DataError(
            f"step {info.step} in {args.dir} is not a whole model",
            why=f"it is the part of node {info.manifest.node} of {info.manifest.nodes}",
            fix="put the parts of all nodes together with `hwrl checkpoints join`, and export the result",
        )
    if not args.model.is_dir():
        raise DataError(
            f"there is no directory {args.model}",
            why="--model names it",
            fix="give --model the directory that training began from",
        )
    with hold_for_reading(info):
        verify_files(info, info.manifest.files)
        weights = read_tensors(info, prefix="model.")
        extra = read_extra(info)[0]
        adapter, of_run = extra.get("adapter"), extra.get("export", {})
        if adapter is not None and not (isinstance(adapter, dict) and {"base", "config"} <= adapter.keys()):
            raise corrupt_error(info.path, f"{EXTRA_NAME} has an adapter that is none of hwrl's")
        kinds = {"max_length": int | None, "chat_template": str | dict | None}
        if not (isinstance(of_run, dict) and all(isinstance(of_run.get(key), kind) for key, kind in kinds.items())):
            raise corrupt_error(info.path, f"{EXTRA_NAME} has settings of an export that are none of hwrl's")
    with _drafting(args.out) as draft:
        if adapter is None:
            _write_model(args, weights, draft, max_length=of_run.get("max_length"))
        else:
            _write_adapter(args, weights, draft, base=adapter["base"], config=adapter["config"])
        _write_tokenizer(args, draft, chat_template=of_run.get("chat_template"))
    what = "model" if adapter is None else "adapter"
    report = {"step": info.step, "out": str(args.out), "wrote": what}
    return report, [f"wrote the {what} of step {info.step} to {args.out}"], True


@contextlib.contextmanager
def _drafting(out: Path) -> Iterator[Path]:
    """Yield a path; after the block, rename it to ``out``. ConfigError for an error of the disk."""
    from safetensors import SafetensorError

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as directory:
            draft = Path(directory) / out.name
            yield draft
            draft.rename(out)
    except (OSError, SafetensorError) as exc:  # safetensors raises its own error for a full disk
        raise ConfigError(
            f"{out} cannot be written", why=str(exc), fix="make room there, or choose another directory"
        ) from exc


def _write_adapter(
    args: argparse.Namespace, weights: dict[str, torch.Tensor], directory: Path, *, base: int, config: dict[str, Any]
) -> None:
    from hwrl.lora import adapter_name, save_adapter
    from hwrl.models import model_identity

    if model_identity(args.model) != base:
        raise _not_the_model(args, why="the adapter was trained on other weights")
    dtype = _dtype(args)
    adapter = {named: weights[name].to(dtype) for name in weights if (named := adapter_name(name))}
    save_adapter(directory, adapter, config=config, model_directory=args.model)


def _write_model(
    args: argparse.Namespace, weights: dict[str, torch.Tensor], directory: Path, *, max_length: int | None
) -> None:
    from hwrl.models import build_model

    model = build_model(args.model, dtype=_dtype(args), max_length=max_length)
    own = model.state_dict()
    wrong = sorted(
        name for name in own.keys() | weights.keys() if name not in own or own[name].shape != _shape(weights, name)
    )
    if wrong:
        raise _not_the_model(args, why=f"{len(wrong)} names or shapes differ, among them {wrong[0]!r}")
    model.load_state_dict(weights)
    model.save_pretrained(directory)


def _write_tokenizer(args: argparse.Namespace, directory: Path, *, chat_template: Any) -> None:
    from hwrl.models import load_tokenizer, use_chat_template

    tokenizer = load_tokenizer(args.model)
    use_chat_template(tokenizer, chat_template, options={})
    tokenizer.save_pretrained(directory)


def _not_the_model(args: argparse.Namespace, *, why: str) -> DataError:
    return DataError(
        f"the checkpoint's model is not the one in {args.model}",
        why=why,
        fix="give --model the directory that training began from",
    )


def _join(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    from hwrl.checkpoint import join_parts

    directories = [args.dir, *map(_checkpoints_in, args.more)]
    step = join_parts(directories, args.out, step=args.step)
    report = {"step": step, "out": str(args.out)}
    return report, [f"joined step {step} from {len(directories)} directories in {args.out}"], True


def _prune(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    from hwrl.checkpoint import CheckpointDirectory, DurableFS, find_checkpoints, verify_files

    if args.keep < 1:
        raise ConfigError(f"--keep {args.keep} is not possible", why="the newest stays", fix="give 1 or more")
    _complete(args)
    owner = _owner(args.dir)
    if owner is not None:
        raise CheckpointError(
            f"{args.dir} is not pruned while a trainer may save there",
            why=owner,
            fix="give the trainer checkpoint.max_ckpt_to_keep, and it prunes itself; or prune after it has ended",
        )
    directory = CheckpointDirectory(args.dir, DurableFS())
    try:
        complete = find_checkpoints(args.dir)[0]
        before = {info.step: info.nbytes for info in complete}
        for info in complete[-args.keep :]:
            verify_files(info, info.manifest.files)  # a damaged checkpoint must not outlive a good one
        if before and not any(info.manifest.nodes > 1 for info in complete):
            directory.set_tracker(max(before))  # other nodes may lack a part; only its trainer knows
        directory.retain(args.keep)
        kept = {info.step for info in find_checkpoints(args.dir)[0]}
    finally:
        directory.close()
    removed = [step for step in before if step not in kept]
    nbytes = sum(before[step] for step in removed)
    report = {"removed": removed, "kept": sorted(kept), "freed_nbytes": nbytes}
    return report, [f"removed steps {removed}, {nbytes / 1e6:,.1f} MB; kept {sorted(kept)}"], True


def _complete(args: argparse.Namespace) -> list[CheckpointInfo]:
    """Return the complete checkpoints, oldest first; CheckpointNotFoundError if there are none."""
    complete, skipped = _find(args)
    if not complete:
        raise _no_checkpoint_error(args.dir, [f"{one.path.name}: {one.reason}" for one in skipped])
    return complete


def _find(args: argparse.Namespace) -> tuple[list[CheckpointInfo], list[Skipped]]:
    """Return the complete checkpoints and the incomplete ones; only those of ``--step`` if it is given."""
    from hwrl.checkpoint import find_checkpoints, step_name

    complete, skipped = find_checkpoints(args.dir)
    step = getattr(args, "step", None)
    if step is None:
        return complete, skipped
    chosen = [info for info in complete if info.step == step]
    named = [one for one in skipped if one.path.name == step_name(step)]
    if not chosen and not named:
        raise CheckpointNotFoundError(
            f"there is no checkpoint of step {step} in {args.dir}",
            why=f"it holds steps {[info.step for info in complete]}",
            fix="choose one of these",
        )
    return chosen, named


def _describe(info: CheckpointInfo) -> dict[str, Any]:
    manifest = info.manifest
    return {
        "step": info.step,
        "path": str(info.path),
        "nbytes": info.nbytes,
        "world_size": manifest.world_size,
        "node": manifest.node,
        "nodes": manifest.nodes,
        "weight_version": manifest.weight_version,
        "saved": _saved_at(info),
        "prompts": _ledger(info),
        "versions": dict(manifest.versions),
    }


def _ledger(info: CheckpointInfo) -> dict[str, Any] | None:
    """Return the state of the prompt ledger in a run's checkpoint; None in another checkpoint, or a damaged one."""
    from hwrl.checkpoint import read_extra

    try:
        state = read_extra(info)[0].get("ledger")
    except CheckpointCorruptError:
        return None
    return state if isinstance(state, dict) and {"trained", "next", "owed"} <= state.keys() else None


def _prompts(info: CheckpointInfo) -> str:
    """Return the number of prompts in each state, as text; empty without a ledger."""
    from hwrl.rollout import count_prompts

    state = _ledger(info)
    if state is None:
        return ""
    try:
        counts = count_prompts(state)
    except DataError as error:
        return f"; its prompts are not known: {error.why}"
    return f"; prompts: {', '.join(f'{count} {name}' for name, count in counts.items())}"


def _part(info: CheckpointInfo) -> str:
    manifest = info.manifest
    return f"  only the part of node {manifest.node} of {manifest.nodes}" if manifest.nodes > 1 else ""


def _saved_at(info: CheckpointInfo) -> str:
    return datetime.fromtimestamp(info.manifest.saved_unix_s, UTC).isoformat(timespec="seconds")


def _shape(weights: dict[str, torch.Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


def _dtype(args: argparse.Namespace) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, args.dtype)
    return dtype
