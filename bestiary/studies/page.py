"""The one HTML page of a study: table, curves, runs, failures and the file itself. Nothing on it is fetched from anywhere."""

import html
import time

from bestiary import __version__
from bestiary.console import duration, short
from bestiary.studies.attempts import last_attempt
from bestiary.studies.results import Outcome
from bestiary.studies.study import Study
from bestiary.webpage import details, document, image, table

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
        f"<h1>{html.escape(study.name)}</h1>",
        f'<p class="small">{done} of {len(outcomes)} runs done · {time.strftime("%Y-%m-%d %H:%M")} · '
        f"bestiary {__version__}</p>",
        table(header, body),
        *(f'<p class="small">{html.escape(caption)}</p>' for caption in captions),
    ]
    for env, picture in figures.items():
        title = f"Learning curves{f': {env}' if len(figures) > 1 else ''}"
        parts += [f"<h2>{html.escape(title)}</h2>", image(picture, title)]
        parts.append('<p class="small">Lines: mean over runs. Bands: from the lowest to the highest run.</p>')
    true = any(outcome.true_return is not None for outcome in outcomes)
    header = [*RUN_HEADER[:4], *(["true return"] if true else []), *RUN_HEADER[4:]]
    parts += ["<h2>Runs</h2>", table(header, [_run_cells(o, states[o.trial].text, true) for o in outcomes])]
    failed = [trial for trial, state in states.items() if state.kind == "failed"]
    if failed:
        parts.append("<h2>Failed</h2>")
    for trial in failed:
        tail = "\n".join(last_attempt(trial.log)[-TAIL_LINES:])
        parts.append(details(f"{trial.name}: {states[trial].text}", tail))
    parts += ["<h2>The study</h2>", details(study.path.name, study.text)]
    return document(study.name, parts)


RUN_HEADER = ["run", "state", "steps", "final return", "evaluated", "time"]


def _run_cells(outcome: Outcome, state: str, true: bool) -> list[str]:
    return [
        outcome.trial.name,
        state,
        short(outcome.trial.run.steps),
        "" if outcome.final is None else f"{outcome.final:.2f}",
        *(["" if outcome.true_return is None else f"{outcome.true_return:.2f}"] if true else []),
        "" if outcome.evaluated is None else f"{outcome.evaluated:.2f}",
        "" if outcome.seconds is None else duration(outcome.seconds),
    ]
