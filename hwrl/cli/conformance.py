"""``hwrl conformance NAME``: run the conformance kit on a backend, an engine or a transport."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hwrl.cli.arguments import local_path
from hwrl.errors import ConfigError
from hwrl.testing.levels import Kind, Level

HELP = "check that a backend, an engine or a transport keeps every promise that hwrl builds on"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    kinds, levels = [kind.value for kind in Kind], [level.value for level in Level]
    parser.add_argument("name", help="the name of a backend, of an engine or of a transport")
    parser.add_argument("--kind", choices=kinds, help="what NAME is, if several things have this name")
    parser.add_argument("--level", choices=levels, default="full", help="how far to go; a level includes those before")
    parser.add_argument("--options", default="{}", help="the options of an engine, as a JSON object")
    parser.add_argument("--json", type=local_path, metavar="FILE", help="write the report as JSON, too")
    parser.add_argument("--badge", type=local_path, metavar="FILE", help="write a badge: .svg, or .json for shields.io")
    parser.add_argument(
        "--timeout-scale", type=float, metavar="N", help="multiply all time limits, for a slow or busy machine"
    )
    parser.add_argument("-k", dest="keyword", default="", help="run only the checks that match this pytest expression")


def run(args: argparse.Namespace) -> int:
    """Run the kit on the named subject, print each result and write the files; return 0 if no check failed."""
    options = _options(args.options)
    _require_folders(args.json, args.badge)
    from hwrl.discovery import get_backend, set_backend
    from hwrl.testing.conformance import run_kit
    from hwrl.testing.report import check_badge_name
    from hwrl.testing.subject import find_subject

    if args.badge is not None:
        check_badge_name(args.badge)
        _refuse_part(args.keyword)
    subject = find_subject(args.name, kind=args.kind and Kind(args.kind), options=options)
    if subject.kind is Kind.BACKEND:
        set_backend(subject.name)
    report = run_kit(
        subject,
        backend=get_backend(),
        level=Level(args.level),
        keyword=args.keyword,
        timeout_scale=args.timeout_scale,
    )
    if args.json is not None:
        report.write_json(args.json)
    if args.badge is not None:
        report.write_badge(args.badge)
    return 0 if report.ok else 1


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(
            "--options cannot be read", why=f"{exc} in {text!r}", fix="write a JSON object, like '{\"room\": 8}'"
        ) from exc
    if not isinstance(found, dict):
        raise ConfigError("--options is not a JSON object", why=f"it is {text!r}", fix="write '{\"name\": value}'")
    return found


def _require_folders(*paths: Path | None) -> None:
    """Raise ConfigError before the checks if the folder of a report is missing."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}", why=f"there is no folder {path.parent}", fix="make it first")


def _refuse_part(keyword: str) -> None:
    if keyword:
        raise ConfigError(
            "a part of the checks earns no badge", why=f"-k {keyword!r} selects some checks", fix="leave -k out"
        )
