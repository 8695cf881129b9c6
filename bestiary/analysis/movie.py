"""Games of trained agents as GIF or MP4: the environment's own picture, not the agent's small input; one, or side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bestiary.analysis.attention import attention_map, check_attends
from bestiary.analysis.files import check_output, check_rate, write_movie
from bestiary.analysis.look_saliency import Look, full_scores, lenses, painted
from bestiary.analysis.paint import overlay, panels
from bestiary.analysis.saliency import Method, Saliency
from bestiary.analysis.stage import Scene, Show, Stage, note_of_the_screen, open_scripted
from bestiary.console import note, tracked
from bestiary.errors import UserError
from bestiary.runs.folder import Run, labels
from bestiary.runs.recordings import Game, Recording

__all__ = ["attention_map", "film", "film_together", "overlay", "write_movie"]


def film(
    run: Run,
    *,
    out: str | Path | None = None,
    length: int = 2_000,
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    fps: float = 0,
    overwrite: bool = False,
    attention: bool = False,
    env: str | None = None,
    replay: tuple[Recording, Game] | None = None,
) -> Path:
    """Film one game, or its first `length` steps (of very short games, several); returns the file.

    With `attention`, where the agent looks is drawn over the picture. Where a flickering game is blank to the agent, it is
    drawn dark. `env` is one of the run's tasks, else the first. With `replay`, a recorded game is shown again, and the agent
    watches."""
    check_rate(fps, out)
    path = check_output(out, overwrite) if out is not None else None
    stage, script = open_scripted(run, replay, checkpoint=checkpoint, env=env, seed=seed)
    if attention:
        check_attends(stage.agent, run.path)
        note_of_the_screen([stage])
    if path is None:
        path = run.new_path("movies", f"{stage.stem}-{'greedy' if greedy else 'sampled'}", ".gif")
    show = Show([stage], length=length, greedy=greedy, script=script)
    pictures = [_attended(scene, stage) if attention else scene.shown for (scene,) in tracked(show, "filming", length)]
    write_movie(path, pictures, fps or show.fps)
    note(f"{len(pictures)} steps, return {', '.join(f'{r:g}' for r in show.earned)}")
    return path


def _attended(scene: Scene, stage: Stage) -> np.ndarray:
    weights = scene.moment.output.extras["attention"][0, 0].numpy()  # [heads,R]
    return overlay(scene.canvas, *attention_map(weights, stage.agent, stage.pool))


@dataclass
class Panel:
    """A game, or a view of it, among others."""

    caption: str
    pictures: list[np.ndarray]


def film_together(
    runs: Sequence[Run],
    *,
    out: str | Path,
    same_actions: bool = False,
    saliency: bool = False,
    length: int | None = None,
    checkpoints: Sequence[int | None] = (),
    greedy: bool = False,
    seed: int = 0,
    fps: float = 0,
    overwrite: bool = False,
    env: str | None = None,
    replay: tuple[Recording, Game] | None = None,
    density: int | None = None,
) -> Path:
    """Several agents side by side. Each plays a game of its own; or, with `same_actions`, all watch the one that the first
    plays (or that was recorded: `replay`). With `saliency`, what would change each agent's mind is painted over its panel, and
    the first panel is the plain game. Who is over first stays on its last picture. `checkpoints` names one for each run, else
    the newest."""
    check_rate(fps, out)
    path, length = check_output(out, overwrite), length or (200 if saliency else 2_000)
    same_actions = same_actions or replay is not None
    if same_actions and not saliency:
        raise UserError(
            "--same-actions, --replay: there is one game, whoever watches; --saliency paints what each makes of it"
        )
    shows: list[Show] = []
    for k, (run, checkpoint) in enumerate(zip(runs, checkpoints or [None] * len(runs), strict=True)):
        like = runs[0] if same_actions else None
        stage, script = open_scripted(run, replay, checkpoint=checkpoint, env=env, seed=seed, like=like)
        if k and same_actions:
            shows[0].stages = [*shows[0].stages, stage]
        else:
            shows.append(Show([stage], length=length, greedy=greedy, script=script))
    stages = [stage for show in shows for stage in show.stages]
    looking = lenses(stages, Method(density, usual_density=4.0)) if saliency else []
    if saliency:
        note_of_the_screen(stages)
    plain, names, made = same_actions or len(runs) == 1, labels(runs), list[Panel]()
    for show in shows:
        count = len(show.stages)
        made += _painted(show, names[:count], looking[:count], plain) if saliency else [_plain(show, names[0])]
        names, looking = names[count:], looking[count:]
    longest = max(len(panel.pictures) for panel in made)
    for panel in made:
        panel.pictures += [panel.pictures[-1]] * (longest - len(panel.pictures))
    captions = [panel.caption for panel in made]
    rows = [panels(row, captions) for row in zip(*(panel.pictures for panel in made), strict=True)]
    write_movie(path, rows, fps or shows[0].fps)
    note(f"{longest} steps, return {', '.join(f'{sum(show.earned):g}' for show in shows)}")
    return path


def _plain(show: Show, name: str) -> Panel:
    return Panel(name, [scenes[0].shown for scenes in tracked(show, "filming", show.length)])


def _painted(show: Show, names: list[str], looking: list[Saliency], plain: bool) -> list[Panel]:
    """The panels of one game: as it is, where `plain`, and as each of its stages sees it."""
    look, played, takes = Look(), [], []
    for scenes in tracked(show, "saliency", show.length):
        played.append(scenes)
        takes.append([lens(s.moment.inputs, s.moment.state) for lens, s in zip(looking, scenes, strict=True)])
    made = [Panel("the game", [scenes[0].shown for scenes in played])] if plain else []
    for k, (name, lens) in enumerate(zip(names, looking, strict=True)):
        own = [take[k] for take in takes]
        full = full_scores(own, look)  # its own: logits of different agents have no common scale
        shown = [painted(scenes[k].canvas, maps, lens, look, full) for scenes, maps in zip(played, own, strict=True)]
        made.append(Panel(name, shown))
    return made
