"""The one HTML page of a study: table, curves, runs, failures and the file itself. Nothing on it is fetched from anywhere."""

import base64
import html
import time
from collections.abc import Iterable

from bestiary import __version__
from bestiary.console import duration, short
from bestiary.studies.attempts import last_attempt
from bestiary.studies.results import Outcome
from bestiary.studies.study import Study

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: white; }
pre { overflow-x: auto; padding: .7rem; background: #8881; font-size: .85rem; }
.small { font-size: .85rem; opacity: .8; }
"""
ALONE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # browsers refuse any request from this page
HEAD = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
TAIL_LINES = 20  # of the log of a failed run


def page(
    study: Study,
    captions: list[str],
    header: list[str],
    body: list[list[str]],
    outcomes: list[Outcome],
    figures: dict[str, bytes],
) -> str:
    states = {outcome.trial: outcome.trial.state() for outcome in outcomes}
    done = sum(state.kind == "done" for state in states.values())
    parts = [
        HEAD,
        f'<meta http-equiv="Content-Security-Policy" content="{ALONE}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(study.name)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(study.name)}</h1>",
        f'<p class="small">{done} of {len(outcomes)} runs done · {time.strftime("%Y-%m-%d %H:%M")} · '
        f"bestiary {__version__}</p>",
        _table(header, body),
        *(f'<p class="small">{html.escape(caption)}</p>' for caption in captions),
    ]
    for env, picture in figures.items():
        title = f"Learning curves{f': {env}' if len(figures) > 1 else ''}"
        parts += [f"<h2>{html.escape(title)}</h2>", _image(picture, title)]
        parts.append('<p class="small">Lines: mean over runs. Bands: from the lowest to the highest run.</p>')
    parts += ["<h2>Runs</h2>", _table(RUN_HEADER, [_run_cells(o, states[o.trial].text) for o in outcomes])]
    failed = [trial for trial, state in states.items() if state.kind == "failed"]
    if failed:
        parts.append("<h2>Failed</h2>")
    for trial in failed:
        tail = "\n".join(last_attempt(trial.log)[-TAIL_LINES:])
        parts.append(_details(f"{trial.name}: {states[trial].text}", tail))
    parts += ["<h2>The study</h2>", _details(study.path.name, study.text), "</body></html>\n"]
    return "\n".join(parts)


RUN_HEADER = ["run", "state", "steps", "final return", "evaluated", "time"]


def _run_cells(outcome: Outcome, state: str) -> list[str]:
    return [
        outcome.trial.name,
        state,
        short(outcome.trial.run.steps),
        "" if outcome.final is None else f"{outcome.final:.2f}",
        "" if outcome.evaluated is None else f"{outcome.evaluated:.2f}",
        "" if outcome.seconds is None else duration(outcome.seconds),
    ]


def _table(header: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in cells) for cells in body)
    filled = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{filled}</tbody></table></div>'


def _image(png: bytes, title: str) -> str:
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"
