"""`bestiary look saliency`: a game with what would change the agent's mind painted over it, and the scores as numbers.

Red is the policy, green the value (orange and blue for eyes that cannot tell those apart). The absolute scale, the usual one,
paints a score as strongly in every frame; the quantile scale always paints the highest tenth of a frame, as the published
movies do, whether the scores are large or nearly nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bestiary.agents.agent import Output
from bestiary.analysis import paint
from bestiary.analysis.files import check_look, check_rate, save_numbers, write_pictures
from bestiary.analysis.saliency import Maps, Method, Saliency, absolute_scale, fill, quantile_scale, usual_full
from bestiary.analysis.stage import Show, Stage, note_of_the_screen, open_scripted
from bestiary.console import note, tracked
from bestiary.errors import UserError
from bestiary.runs.folder import Run
from bestiary.runs.recordings import Game, Recording

COLORS: dict[str, dict[str, paint.Color]] = {
    "red-green": {"policy": (255, 0, 0), "value": (0, 255, 0)},
    "orange-blue": {"policy": (255, 140, 0), "value": (40, 130, 255)},
}
OUTPUTS = {"policy": ("policy",), "value": ("value",), "both": ("policy", "value")}


@dataclass(frozen=True)
class Look:
    """How scores become colour."""

    output: str = "both"  # policy or value
    scale: str = "absolute"  # or quantile
    colors: str = "red-green"  # or orange-blue
    full: tuple[float | None, float | None] = (None, None)  # scores of policy and value at full strength


def look_saliency(
    run: Run,
    *,
    out: str | Path | None = None,
    start: int = 0,
    length: int = 300,
    method: Method = Method(),
    look: Look = Look(),
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    fps: float = 0,
    overwrite: bool = False,
    env: str | None = None,
    replay: tuple[Recording, Game] | None = None,
) -> list[Path]:
    """Play a game and paint it; the raw scores go beside it as .npz. Returns the file with the pictures, or the files."""
    check_rate(fps, out)
    path = check_look(out, overwrite, length) if out is not None else None
    stage, script = open_scripted(run, replay, checkpoint=checkpoint, env=env, seed=seed)
    (lens,) = lenses([stage], method)
    path = path or run.new_path("looks", f"saliency-{stage.stem}-{start}", ".gif")
    note_of_the_screen([stage])
    show = Show([stage], start=start, length=length, greedy=greedy, script=script)
    pictures, maps, answers = list[np.ndarray](), list[Maps](), list[tuple[str, Output]]()
    for (scene,) in tracked(show, "saliency", length):
        pictures.append(scene.canvas)
        maps.append(lens(scene.moment.inputs, scene.moment.state))
        answers.append((scene.action, scene.moment.output))
    full = full_scores(maps, look)
    shown = [painted(picture, m, lens, look, full) for picture, m in zip(pictures, maps, strict=True)]
    written = write_pictures(path, shown, fps or show.fps, first=start)
    protocol = {
        **show.protocol(),
        **asdict(method),
        "density": lens.density,
        "radius": lens.radius,
        "blur": lens.blur,
        **asdict(look),
        "full": full,
    }
    scores = {name: np.stack([getattr(m, name) for m in maps]) for name in ("policy", "value")}  # [T,h,w]
    save_numbers(path.with_suffix(".npz"), answers, start, protocol, **scores)
    strongest = ", ".join(f"{name} {full[name]:.3g}" for name in OUTPUTS[look.output])
    at = f"full colour at {strongest}" if look.scale == "absolute" else "the highest tenth of each frame is coloured"
    note(f"{len(maps)} steps, {at}; scores: {path.with_suffix('.npz')}")
    return written


def lenses(stages: Sequence[Stage], method: Method) -> list[Saliency]:
    """One for each agent; where one has no pictures, all stages are closed."""
    made = []
    for stage in stages:
        try:
            made.append(Saliency(stage.agent, stage.pool.observation_spec, method))
        except UserError as error:
            for each in stages:
                each.pool.close()
            raise UserError(*(f"{stage.run.path}: {problem}" for problem in error.problems)) from None
    return made


def full_scores(take: Sequence[Maps], look: Look) -> dict[str, float]:
    """The scores that are painted at full strength, the same in all of an agent's pictures."""
    given = dict(zip(("policy", "value"), look.full, strict=True))
    usual = {name: usual_full([getattr(maps, name) for maps in take]) for name in given}
    return {name: usual[name] if given[name] is None else float(given[name] or 0) for name in given}


def painted(picture: np.ndarray, maps: Maps, lens: Saliency, look: Look, full: dict[str, float]) -> np.ndarray:
    """A picture of all that the agent sees with the scores of one moment over it, each where it is about."""
    heats = []
    for name in OUTPUTS[look.output]:
        scores = fill(getattr(maps, name), lens.density, (lens.height, lens.width))
        heat = quantile_scale(scores) if look.scale == "quantile" else absolute_scale(scores, full[name])
        heats.append((np.clip(paint.stretch(heat, picture.shape[:2]), 0, 1), COLORS[look.colors][name]))
    return paint.paint(picture, heats)
