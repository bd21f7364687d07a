"""``hwrl report``: a page about a run, from its directory."""

from __future__ import annotations

import argparse

from hwrl.cli import local_path
from hwrl.errors import RunDirectoryError

HELP = "write an HTML page about a run: curves, throughput, staleness, faults, samples"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dir", type=local_path, metavar="RUN_DIR", help="a run's directory; the run may still run")
    parser.add_argument("--out", type=local_path, metavar="FILE", help="the page; default: RUN_DIR/report.html")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path; 0 on success."""
    from hwrl.checkpoint import DurableFS
    from hwrl_report.build import build_page

    out = args.dir / "report.html" if args.out is None else args.out
    if out.exists() and not out.is_file():  # a rename would put a file in the place of /dev/stdout
        raise RunDirectoryError(f"{out} cannot be written", why="it is not a file", fix="name another file with --out")
    page = build_page(args.dir)
    try:
        DurableFS().replace_file(out, page)  # a browser that loads it meanwhile finds the old page
    except OSError as exc:
        raise RunDirectoryError(
            f"{out} cannot be written", why=exc.strerror or str(exc), fix="choose another place with --out FILE"
        ) from exc
    print(f"wrote {out} ({len(page) / 1e6:.1f} MB)")
    return 0
