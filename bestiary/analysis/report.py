"""`bestiary report FOLDER`: all runs below a folder on one page: a table, learning curves, movies, saliency, evaluations.

The page is one file with no request to anywhere, for a disk, a mail or a phone. What is missing of a run, a short movie and a
saliency still, is drawn first, unless it is told not to."""

import html
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bestiary import __version__
from bestiary.analysis.compare import draw, games_of, group_runs, panels_by_task
from bestiary.analysis.files import check_output
from bestiary.analysis.look_saliency import look_saliency
from bestiary.analysis.movie import film
from bestiary.analysis.saliency import Method
from bestiary.config import plain_name
from bestiary.console import note, tracked
from bestiary.errors import UserError
from bestiary.runs.folder import Run
from bestiary.runs.listing import COLUMNS, describe_run, find_runs
from bestiary.webpage import details, document, image, picture, table

MOVING = (".gif", ".mp4")
LARGEST = 4 * 2**20  # bytes of a movie or picture on the page
STEPS = 150  # of a movie that is made for it
STILL = 100  # the step that a saliency still shows, where the game lasts that long
CAPTIONS = {
    "saliency": "what would change its mind: red its policy, green its value, yellow both",
    "attention": "where its heads look",
    "actions": "what it does",
    "filters": "how far its filters are from others",
    "drawings": "what excites its filters",
}


def report(folder: Path, out: Path, *, drawing: bool = True, trust_code: bool = False, overwrite: bool = False) -> Path:
    """Write the page; returns its path."""
    out = check_output(out, overwrite, (".html", ".htm"), "a page is")
    runs = [Run(path, trust_code) for path in find_runs(folder)]
    if drawing:
        for run in tracked(runs, "drawing", len(runs)):
            draw_missing(run)
    text = page(folder, runs)
    temporary = out.with_name(f".{out.name}")
    temporary.write_text(text)
    temporary.replace(out)
    note(f"{len(runs)} runs, {out.stat().st_size / 2**20:.1f} MiB")
    return out


def draw_missing(run: Run) -> None:
    """A movie and a saliency still of each task that has none; says so where one cannot be."""
    if not run.checkpoints:
        return
    movies, stills = _newest(run, "movies", MOVING), _newest(run, "looks", (".png",))
    with _forgiving(str(run.path)):
        envs, seen = run.config.envs, _spec(run)
        for env in envs:
            task = f"-{plain_name(env)}" if len(envs) > 1 else ""
            with _forgiving(f"{run.path}{f', {env}' if task else ''}"):
                if task[1:] not in movies:
                    film(run, length=STEPS, env=env)
                if f"saliency{task}" not in stills and "image" in seen:
                    _still(run, env, task)


@contextmanager
def _forgiving(what: str) -> Iterator[None]:
    """Whatever is wrong with it, among it a user's own parts: the others have their pictures."""
    try:
        yield
    except Exception as error:
        note(f"{what}: not drawn: {(str(error) or type(error).__name__).splitlines()[0]}")


def _spec(run: Run) -> Any:
    pool = run.config.make_pool(1, 0)
    pool.close()
    return pool.observation_spec


def _still(run: Run, env: str, task: str) -> None:
    for start in (STILL, 0):
        path = run.new_path("looks", f"saliency{task}-{run.steps:012d}-{start}", ".png")
        try:
            look_saliency(run, out=path, start=start, length=1, method=Method(usual_density=3.0), env=env)
            return
        except UserError:
            if not start:
                raise


def page(folder: Path, runs: list[Run]) -> str:
    places = [f"run-{k}" for k in range(len(runs))]
    names = [_name(run, folder) for run in runs]
    rows = [[name, *describe_run(run.path)] for name, run in zip(names, runs, strict=True)]
    parts = [
        f"<h1>{html.escape(folder.resolve().name)}</h1>",
        f'<p class="small">{len(runs)} runs · {time.strftime("%Y-%m-%d %H:%M")} · bestiary {__version__}</p>',
        table(["run", *COLUMNS], rows, places),
        *_curves(runs),
    ]
    for run, name, place in zip(runs, names, places, strict=True):
        parts += [f'<h2 id="{place}">{html.escape(name)}</h2>', *_run(run)]
    return document(f"{folder.resolve().name}: {len(runs)} runs", parts)


def _name(run: Run, folder: Path) -> str:
    return str(run.path.resolve().relative_to(folder.resolve())) if run.path.resolve() != folder.resolve() else run.name


def _curves(runs: list[Run]) -> Iterator[str]:
    """A figure for each set of environments: returns of different worlds do not belong on one axis."""
    by_env: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        try:
            several = len(run.settings["env"]) > 1
            games_of(run, run.episodes["task"][0] if several and run.episodes else None)
            by_env.setdefault(tuple(run.settings["env"]), []).append(run)
        except (UserError, KeyError, IndexError):
            continue  # no game finished yet
    for names, members in by_env.items():
        panels = panels_by_task(members) if len(names) > 1 else {"": group_runs(members)}
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "curves.png"
            draw(panels, path)
            title = f"Learning curves: {', '.join(name.rsplit('/', 1)[-1] for name in names)}"
            yield f"<h2>{html.escape(title)}</h2>{image(path.read_bytes(), title)}"
            yield '<p class="small">Lines: mean over seeds. Bands: from the lowest to the highest.</p>'


def _run(run: Run) -> Iterator[str]:
    shown = []
    shown += [_shown(movie, "playing", small=True) for movie in _newest(run, "movies", MOVING).values()]
    stills, moving = _newest(run, "looks", (".png",)), _newest(run, "looks", MOVING)
    for subject in sorted({*stills, *moving}):
        kind = subject.split("-")[0]
        shown += [_shown(found[subject], kind, kind == "saliency") for found in (stills, moving) if subject in found]
    if shown:
        yield f'<div class="pictures">{"".join(shown)}</div>'
    if evaluations := list(_evaluations(run)):
        yield "<h3>Evaluations</h3>"
        yield table(["what", "checkpoint", "policy", "games", "mean return", "95% interval"], evaluations)
    try:
        yield details("settings", "\n".join(f"{key} = {value}" for key, value in run.settings.items()))
    except UserError as error:
        yield f'<p class="small">{html.escape(str(error))}</p>'


def _shown(path: Path, what: str, small: bool) -> str:
    if (size := path.stat().st_size) > LARGEST:
        text = f"{what}: {path.name} has {size / 2**20:.0f} MiB, too much for a page"
        return f'<p class="small">{html.escape(text)}</p>'
    return picture(path, f"{CAPTIONS.get(what, what)} ({path.stem})", small)


def _folder(run: Run, name: str) -> Path:
    return (Path("runs") / f"zoo-{run.name}" if run.shipped else run.path) / name


def _newest(run: Run, folder: str, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """The newest picture of each subject: the one of saliency-Pong-000001000000-100.png is saliency-Pong."""
    found = [path for path in _folder(run, folder).glob("*.*") if path.suffix in suffixes]
    by_age = sorted(found, key=lambda path: path.stat().st_mtime)
    newest = {re.sub(r"-?\d{12}(-.*)?$", "", path.stem): path for path in by_age}
    return dict(sorted(newest.items()))


def _evaluations(run: Run) -> Iterator[list[str]]:
    for path in sorted(_folder(run, "evaluations").glob("*.json")):
        try:
            found = json.loads(path.read_text())
            protocol = found["protocol"]
            for part in found.get("parts", [found]):
                game = part["statistics"]["game"]
                at = part.get("checkpoint", protocol.get("checkpoint_steps", ""))
                what = " ".join(str(part[key]) for key in ("task", "levels", "role") if part.get(key))
                interval = f"{game['ci_low']:.2f} to {game['ci_high']:.2f}"
                cells = [what, f"{at:,}", protocol["policy"], f"{game['n']:.0f}", f"{game['mean']:.2f}", interval]
                yield [str(cell) for cell in cells]
        except (ValueError, KeyError, TypeError, OSError):
            continue  # not one of ours, or cut off
