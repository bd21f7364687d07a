"""Assemble the page: numbers and text become HTML, and curves become data for the script in the page."""

from __future__ import annotations

import base64
import hashlib
import math
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hwrl import __version__
from hwrl.checkpoint import find_owner
from hwrl.errors import RunDirectoryError
from hwrl.files import read_file
from hwrl.run import busy_shares, read_lines
from hwrl_report.charts import FAULT_CHARTS, LEFT_OUT, SECTIONS, Chart, assign, timeline
from hwrl_report.columns import MetricColumns, read_columns, thin_out
from hwrl_report.faults import count_faults, render_faults
from hwrl_report.markup import element, escaped, json_for_script, number, seconds
from hwrl_report.sample_list import render_samples

CONFIG, EVENTS, METRICS = "config.yaml", "events.jsonl", "metrics.jsonl"
PROMPTS, SAMPLES = "trained_prompts.jsonl", "samples.jsonl"
MAX_MARKED_EVENTS = 500
MAX_OTHERS = 1000
"""Charts of metrics that no section shows."""
_MAX_CONFIG_NBYTES = 1 << 20
_MARKED = ("start", "replica", "trainer", "scale", "error")
_BUSY = (
    *("perf/step_s", "rollout/replicas", "timing_s/train", "timing_s/critic", "timing_s/sync", "timing_s/save"),
    *("rollout/generate_s", "rollout/update_s", "rollout/sleep_s"),
)
"""What :func:`hwrl.run.busy_shares` reads."""
_Event = dict[str, Any]
_Drawn = dict[str, tuple[Chart, list[str]]]


def build_page(directory: Path) -> bytes:
    """Return the page about the run in ``directory`` as UTF-8. The run may still be running.

    The page is self-contained: it loads nothing from elsewhere. Raises RunDirectoryError if the directory holds no run,
    or if a file cannot be read.
    """
    try:
        with np.errstate(all="ignore"):  # metrics may be infinite, or not a number
            return _page(directory).encode()
    except FileNotFoundError as exc:
        raise RunDirectoryError(
            f"{directory} holds no run",
            why=f"there is no {Path(exc.filename or directory).name}",
            fix=f"there is a run in {directory / 'run'}: name that directory"
            if (directory / "run" / METRICS).is_file()
            else "name a run directory: dir=… of a run of hwrl train",
        ) from exc
    except OSError as exc:
        raise RunDirectoryError(
            f"{directory} cannot be read", why=str(exc), fix="fix the cause, and call hwrl report again"
        ) from exc


def _page(directory: Path) -> str:
    (directory / METRICS).lstat()  # raises if there is no run
    columns = read_columns(directory / METRICS)
    lines = (event for _, event in read_lines(directory / EVENTS) if event is not None)
    events = [event for event in lines if isinstance(event.get("text"), str)]
    names = [name for name in columns.values if name not in LEFT_OUT]
    faults = assign(FAULT_CHARTS, names)  # first, because other charts would also match the ledger's counts
    sections = {title: assign(charts, names) for title, charts in SECTIONS.items()}
    others = {f"other-{place}": (Chart(name, ""), [name]) for place, name in enumerate(sorted(names)[:MAX_OTHERS])}
    title = "Show all" if len(names) <= MAX_OTHERS else f"Show {MAX_OTHERS} of {len(names):,}, by name"
    bars = timeline(columns)
    parts = [
        _header(directory, columns, events),
        *(_section(title, _figures(found)) for title, found in sections.items()),
        _section("Timeline", _timeline_figures(columns, bars)),
        _section("Faults", render_faults(columns, events, directory / PROMPTS) + _figures(faults)),
        _section("Samples", render_samples(directory / SAMPLES)),
        _section("Other metrics", element("details", element("summary", title) + _figures(others))),
        _section("Configuration", _configuration(directory / CONFIG)),
    ]
    drawn: _Drawn = {key: value for found in (*sections.values(), faults, others) for key, value in found.items()}
    data = {**_data(columns, drawn), "bars": bars, "events": _marks(events)}
    return _document(directory, "".join(parts), json_for_script(data))


def _document(directory: Path, body: str, data: str) -> str:
    """Return the HTML document. Its security policy allows only its own script, and no loading from elsewhere."""
    script, style = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.js", "page.css"))
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; script-src '{_sha256(script)}'; "
        f"style-src '{_sha256(style)}'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_name(directory)} · hwrl report</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'{_bar()}\n<main>\n{body}\n</main>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _name(directory: Path) -> str:
    return escaped("/".join(directory.absolute().parts[-2:]).removeprefix("//"))


def _sha256(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _bar() -> str:
    titles = [*SECTIONS, "Timeline", "Faults", "Samples", "Other metrics", "Configuration"]
    links = "".join(element("a", title, href=f"#{_anchor(title)}") for title in titles)
    controls = (
        '<label>smooth <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0"></label>'
        '<label>x axis <select id="x-axis"><option value="step">step</option><option value="time">time</option>'
        '</select></label><button id="reset" type="button" disabled>whole run</button>'
    )
    return element("nav", f"<span>{links}</span><span>{controls}</span>") + (
        "<noscript><p>The curves need JavaScript; the text on this page does not.</p></noscript>"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(title: str, content: str) -> str:
    return element("section", element("h2", title) + (content or "<p class='note'>nothing yet</p>"), id=_anchor(title))


# -- the top of the page --------------------------------------------------------------------------------------------


def _header(directory: Path, columns: MetricColumns, events: list[_Event]) -> str:
    state, text = run_state(directory, columns, events)
    made = f"page written by hwrl {escaped(__version__)} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC"
    tiles = "".join(
        element("div", element("dt", name) + element("dd", value) + element("small", escaped(note)))
        for name, value, note in _tiles(columns, events)
    )
    shares = busy_shares(list(columns.rows([*_BUSY])))
    bottleneck = "" if shares is None else element("p", f"Bottleneck: {escaped(shares)}.")
    return element(
        "header",
        element("h1", _name(directory))
        + element("p", element("b", escaped(state), class_=f"state {state}") + " " + escaped(text))
        + element("dl", tiles, class_="tiles")
        + bottleneck
        + element("p", f"{escaped(directory.absolute())} · {made}", class_="note"),
    )


def run_state(directory: Path, columns: MetricColumns, events: list[_Event]) -> tuple[str, str]:
    """Return the state of the run, as one word and as a sentence."""
    step = columns.last("step")
    at = "before its first step" if step is None else f"after step {step:.0f}"
    if (owner := find_owner(directory)) is not None:
        return "running", f"{at}; {owner}"
    last = events[-1] if events else {}
    first_line = str(last.get("text", "")).partition("\n")[0]
    if last.get("kind") == "end":
        return ("interrupted" if first_line.startswith("interrupted") else "finished"), first_line
    if last.get("kind") == "error":
        return "failed", f"{at}: {first_line}"
    if not events:
        return "unknown", f"{at}; the run has no log"
    return "killed", f"{at}: its log has no last event, so the process was killed or its machine died"


def _tiles(columns: MetricColumns, events: list[_Event]) -> list[tuple[str, str, str]]:
    """Return the name, the value and a note for each number at the top of the page."""
    tiles = [
        ("steps", number(columns.last("step") or 0), ""),
        ("time", seconds(columns.last("time_s") or 0.0), "spent in training"),
        ("tokens", number(columns.last("response/tokens_total") or 0), "of trained responses"),
    ]
    for name, title in (("reward/mean", "reward"), ("eval/reward", "eval reward"), ("eval/exact", "eval exact")):
        if name in columns.values:
            best = max(filter(math.isfinite, columns.values[name].tolist()), default=None)
            tiles.append((title, number(columns.last(name)), f"best {number(best)}"))
    for name, title in (("perf/tokens_per_s_per_device", "tokens/s per device"), ("perf/mfu", "MFU")):
        if name in columns.values:
            tiles.append((title, number(_median(columns, name)), "median of all steps"))
    if "staleness/mean" in columns.values:
        most = number(float(columns.values["staleness/max"].max())) if "staleness/max" in columns.values else "–"
        mean = number(float(columns.values["staleness/mean"].mean()))
        tiles.append(("staleness", mean, f"versions on average, at most {most}"))
    faults = count_faults(columns, events)
    restarts = faults["trainer restarts"] + faults["replicas replaced"]
    tiles.append(("restarts", number(restarts), "of trainers and replicas"))
    return tiles


def _median(columns: MetricColumns, name: str) -> float:
    ordered = sorted(columns.values[name].tolist())
    return float(ordered[len(ordered) // 2])


def _configuration(path: Path) -> str:
    try:
        text = read_file(path, max_nbytes=_MAX_CONFIG_NBYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return element("details", element("summary", CONFIG) + element("pre", escaped(text)))


# -- charts ---------------------------------------------------------------------------------------------------------


def _figures(found: _Drawn) -> str:
    figures = "".join(
        element("figure", _caption(chart.title, chart.hint), data_chart=key) for key, (chart, _) in found.items()
    )
    return element("div", figures, class_="charts") if figures else ""


def _caption(title: str, hint: str) -> str:
    return element("figcaption", escaped(title) + (element("small", escaped(hint)) if hint else ""))


def _timeline_figures(columns: MetricColumns, bars: dict[str, object] | None) -> str:
    if bars is None:
        return ""
    idle = {side: columns.values.get(f"{side}/idle_ratio") for side in ("trainer", "rollout")}
    means = {side: f"{float(values.mean()):.0%}" for side, values in idle.items() if values is not None}
    text = (
        f"The trainer waited for responses for {means.get('trainer', '–')} of its time. Replicas were idle for "
        f"{means.get('rollout', '–')} of their time, at the limit of their lead or between prompts. Each bar shows the "
        "seconds of a step; with many steps, it shows the mean of neighbouring steps."
    )
    captions = {
        "bars-trainer": _caption("Trainer", "waiting for a batch, training, sending weights, saving"),
        "bars-replica": _caption("Average replica", "idle, generating, taking weights, going to sleep and waking up"),
    }
    figures = "".join(element("figure", caption, data_chart=key, class_="wide") for key, caption in captions.items())
    return element("p", text) + element("div", figures, class_="charts")


def _data(columns: MetricColumns, drawn: _Drawn) -> dict[str, Any]:
    """Return the points of all charts. Curves over the same steps share one list of steps."""
    shared: dict[tuple[int, ...], int] = {}
    series: dict[str, dict[str, Any]] = {}
    for name in ("time_s", *dict.fromkeys(name for _, names in drawn.values() for name in names)):
        if name not in columns.values:
            continue
        curve = thin_out(columns.steps[name], columns.values[name])
        place = shared.setdefault(tuple(curve.steps), len(shared))
        series[name] = {"x": place, "v": curve.values}
        if curve.minimum is not None:
            series[name] |= {"lo": curve.minimum, "hi": curve.maximum}
    charts = {key: names for key, (_, names) in drawn.items()}
    return {"x": [list(steps) for steps in shared], "series": series, "charts": charts}


def _marks(events: list[_Event]) -> list[list[object]]:
    """Return the events to mark in the charts, as steps and kinds. The first start is not marked."""
    marked = [event for event in events if event.get("kind") in _MARKED][1:]
    return [[event["step"], event["kind"]] for event in marked[-MAX_MARKED_EVENTS:]]
