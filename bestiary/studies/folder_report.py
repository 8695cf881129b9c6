"""Write a report about all runs below a folder (`bestiary report FOLDER`).

The report is one HTML file that contains a table, learning curves, videos, saliency images and evaluations. By default
(`draw_missing`), the video and the saliency image of each task of each run are created first if they are missing.
"""

import html
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bestiary import __version__
from bestiary.config.config import env_slug
from bestiary.evaluation.curve_plots import curve_caption, plot_curves
from bestiary.evaluation.learning_curves import DEFAULT_SMOOTH, finished_tasks, group_runs, panels_by_task
from bestiary.evaluation.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, check_output
from bestiary.evaluation.playback import PlaybackOptions
from bestiary.evaluation.run_outputs import EVALUATION_COLUMNS, evaluation_rows, output_files
from bestiary.evaluation.video import record_video
from bestiary.interpretability.saliency import SaliencyOptions
from bestiary.interpretability.saliency_video import render_saliency
from bestiary.runs.listing import COLUMNS, describe_run, find_runs
from bestiary.runs.run import Run
from bestiary.utils import safe_files
from bestiary.utils.console import note, progress_bar, valid_text
from bestiary.utils.errors import UserError
from bestiary.utils.html import render_details, render_figure, render_image, render_page, render_table

MAX_FILE_BYTES = 4 * 2**20  # images and videos that are larger are left out of the report
# Images and videos beyond these limits are left out, too: the page is built in memory. Files of zeros (sparse files)
# need no space on the disk, so a run folder can contain more data than the memory.
MAX_RUN_BYTES = 64 * 2**20  # all images and videos of one run
MAX_PAGE_BYTES = 512 * 2**20  # all images and videos of a page
MAX_ERROR = 500  # maximum number of characters of an error message on the page
VIDEO_STEPS = 150  # length of a video that is created for the report
SALIENCY_STEP = 100  # step of a game at which a saliency image is created for the report
CAPTIONS = {
    "video": "Game",
    "saliency": "Saliency: image regions that change the policy (red), the value (green) or both (yellow)",
    "attention": "Attention of each head",
    "actions": "Action frequencies",
    "filters": "Similarity of convolution filters",
    "activations": "Images that maximise the activation of each filter",
}


def write_folder_report(
    folder: Path, out: Path, *, draw_missing: bool = True, trust_code: bool = False, overwrite: bool = False
) -> Path:
    """Write a report about all runs below a folder to the file `out` and return its path."""
    out = check_output(out, overwrite, (".html", ".htm"), "reports")
    runs = [Run(path, trust_code) for path in find_runs(folder)]
    if draw_missing:
        for run in progress_bar(runs, "drawing", len(runs)):
            render_missing(run)
    page = _render_report(folder, runs)
    safe_files.write_text(out, valid_text(page))  # names of folders may contain bytes that are not text
    note(f"the report describes {len(runs)} runs; its size is {out.stat().st_size / 2**20:.1f} MiB")
    return out


# --- missing videos and saliency images ---


def render_missing(run: Run) -> None:
    """For each task of a run, create a video and a saliency image if the run folder has none.

    Errors are printed and not raised. Saliency images are created only if the agent observes images.
    """
    if not run.checkpoints:
        return
    videos = _newest_files(run, "videos", VIDEO_SUFFIXES)
    images = _newest_files(run, "interpretability", IMAGE_SUFFIXES)
    with _print_errors(str(run.path)):
        envs = run.config.envs
        has_images = _observes_images(run)
        for env in envs:
            task = env_slug(env) if len(envs) > 1 else ""
            with _print_errors(f"{run.path}, {env}" if task else str(run.path)):
                if task not in videos:
                    record_video(run, PlaybackOptions(length=VIDEO_STEPS, env=env))
                stem = f"saliency-{task}" if task else "saliency"
                if stem not in images and has_images:
                    _render_saliency_image(run, env, stem)


@contextmanager
def _print_errors(subject: str) -> Iterator[None]:
    """Return a context in which errors are printed, and not raised.

    `subject` names the run, or the run and its task, in the message, for example "runs/r1".
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        note(f"{subject}: a video or saliency image is missing and could not be created: {reason}")


def _observes_images(run: Run) -> bool:
    return "image" in run.config.interface.observation_spec


def _render_saliency_image(run: Run, env: str, stem: str) -> None:
    """Write an image of the saliency at SALIENCY_STEP of a game, or at step 0 if the game is shorter."""
    for start in (SALIENCY_STEP, 0):
        path = run.new_output_path("interpretability", f"{stem}-{run.steps:012d}-{start}", ".png")
        playback = PlaybackOptions(start=start, length=1, env=env)
        try:
            render_saliency(run, playback, out=path, saliency_options=SaliencyOptions(default_density=3.0))
            return
        except UserError:
            if start == 0:
                raise


# --- page ---


@dataclass
class MediaSpace:
    """The space that is left for the images and videos of a run on the page."""

    left: int  # free space, in bytes
    used: int = 0  # space of the files so far, in bytes

    def take(self, path: Path) -> str | None:
        """Reserve the space of a file and return None. If the file does not fit, return the reason as a text."""
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            return f"{path.name} is too large for the report ({size / 2**20:.0f} MiB)"
        if size > self.left:
            return f"{path.name} is left out, because the other images and videos already fill the available space"
        self.left -= size
        self.used += size
        return None


def _render_report(folder: Path, runs: list[Run]) -> str:
    title = folder.resolve().name
    anchors = [f"run-{k}" for k in range(len(runs))]
    names = [_relative_name(run, folder) for run in runs]
    rows = [[name, *describe_run(run.path)] for name, run in zip(names, runs, strict=True)]
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="small">{len(runs)} runs · {time.strftime("%Y-%m-%d %H:%M")} · bestiary {__version__}</p>',
        render_table(["run", *COLUMNS], rows, anchors),
        *_render_curves(runs),
    ]
    page_bytes = MAX_PAGE_BYTES
    for run, name, anchor in zip(runs, names, anchors, strict=True):
        sections.append(f'<h2 id="{anchor}">{html.escape(name)}</h2>')
        space = MediaSpace(min(MAX_RUN_BYTES, page_bytes))
        try:
            sections += _render_run(run, space)
        except Exception as error:  # a damaged run must not prevent the report about the other runs
            sections.append(f'<p class="small">unreadable: {html.escape(str(error)[:MAX_ERROR])}</p>')
        page_bytes -= space.used
    return render_page(f"{title}: {len(runs)} runs", sections)


def _relative_name(run: Run, folder: Path) -> str:
    """Return the path of the run relative to `folder`. If the run folder is `folder` itself, return the run's name."""
    path, root = run.path.resolve(), folder.resolve()
    return run.name if path == root else str(path.relative_to(root))


def _render_curves(runs: list[Run]) -> Iterator[str]:
    """Yield the HTML of the learning curves: one figure per set of environments.

    Runs in different environments are not drawn in one figure, because their returns are not comparable.
    """
    by_envs: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        try:
            if finished_tasks(run):  # leave out runs in which no game has ended yet
                by_envs.setdefault(tuple(run.raw_config["env"]), []).append(run)
        except Exception:
            continue  # the config or the table of episodes cannot be read
    for envs, members in by_envs.items():
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "curves.png"
            try:
                plot_curves(panels_by_task(members) if len(envs) > 1 else {"": group_runs(members)}, path)
            except Exception as error:  # a damaged run must not prevent the rest of the report
                yield f'<p class="small">no learning curves: {html.escape(str(error)[:MAX_ERROR])}</p>'
                continue
            title = f"Learning curves: {', '.join(env.rsplit('/', 1)[-1] for env in envs)}"
            yield f"<h2>{html.escape(title)}</h2>{render_image(path.read_bytes(), title)}"
            yield f'<p class="small">{html.escape(curve_caption(DEFAULT_SMOOTH))}</p>'


def _render_run(run: Run, space: MediaSpace) -> Iterator[str]:
    """Yield the HTML of the videos, interpretability figures, evaluations and settings of one run."""
    figures = [_render_media(path, "video", space) for path in _newest_files(run, "videos", VIDEO_SUFFIXES).values()]
    images = _newest_files(run, "interpretability", IMAGE_SUFFIXES)
    videos = _newest_files(run, "interpretability", VIDEO_SUFFIXES)
    for subject in sorted({*images, *videos}):
        figures += [
            _render_media(files[subject], subject.split("-")[0], space)
            for files in (images, videos)
            if subject in files
        ]
    if figures:
        yield f'<div class="figures">{"".join(figures)}</div>'
    if evaluations := list(evaluation_rows(run)):
        yield "<h3>Evaluations</h3>"
        yield render_table(EVALUATION_COLUMNS, evaluations)
        yield '<p class="small">95% interval: interval of the mean return, over the games of the row.</p>'
    try:
        yield render_details("Settings", "\n".join(f"{key} = {value}" for key, value in run.raw_config.items()))
    except UserError as error:
        yield f'<p class="small">{html.escape(str(error))}</p>'


def _render_media(path: Path, kind: str, space: MediaSpace) -> str:
    """Return the HTML of a figure with an image or video. If the file is too large, return a text that says so."""
    if (problem := space.take(path)) is not None:
        text = f"{kind}: {problem}"
        return f'<p class="small">{html.escape(text)}</p>'
    return render_figure(path, f"{CAPTIONS.get(kind, kind)} ({path.stem})", small=kind in ("video", "saliency"))


def _newest_files(run: Run, folder: str, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return {subject: newest file} for the files with one of the suffixes in the subfolder `folder` of a run.

    The subject is the start of the file name, for example saliency-Pong for saliency-Pong-000001000000-100.png.
    """
    paths = [path for path in output_files(run, folder) if path.suffix in suffixes]
    by_age = sorted(paths, key=lambda path: path.stat().st_mtime)
    newest = {re.sub(r"-?\d{12}(-.*)?$", "", path.stem): path for path in by_age}
    return dict(sorted(newest.items()))
