"""`bestiary look attention`: a game, and beside it where each of the agent's heads looks."""

from pathlib import Path

import numpy as np

from bestiary.agents.agent import Output
from bestiary.analysis.attention import attention_map, check_attends
from bestiary.analysis.files import check_look, check_rate, save_numbers, write_pictures
from bestiary.analysis.paint import overlay, panels
from bestiary.analysis.stage import Scene, Show, Stage, note_of_the_screen, open_scripted
from bestiary.console import note, tracked
from bestiary.errors import UserError
from bestiary.runs.folder import Run
from bestiary.runs.recordings import Game, Recording


def look_attention(
    run: Run,
    *,
    out: str | Path | None = None,
    start: int = 0,
    length: int = 300,
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    fps: float = 0,
    overwrite: bool = False,
    env: str | None = None,
    replay: tuple[Recording, Game] | None = None,
) -> list[Path]:
    """Panels side by side: the game as it is, then a head each. The weights go beside them as .npz. Returns the file with the
    pictures, or the files."""
    check_rate(fps, out)
    path = check_look(out, overwrite, length) if out is not None else None
    stage, script = open_scripted(run, replay, checkpoint=checkpoint, env=env, seed=seed)
    try:
        check_attends(stage.agent, run.path)
    except UserError:
        stage.pool.close()
        raise
    path = path or run.new_path("looks", f"attention-{stage.stem}-{start}", ".gif")
    note_of_the_screen([stage])
    show = Show([stage], start=start, length=length, greedy=greedy, script=script)
    pictures, weights, answers = [], [], list[tuple[str, Output]]()
    for (scene,) in tracked(show, "attention", length):
        weights.append(scene.moment.output.extras["attention"][0, 0].numpy())  # [heads,R]
        pictures.append(_heads(scene, weights[-1], stage))
        answers.append((scene.action, scene.moment.output))
    written = write_pictures(path, pictures, fps or show.fps, first=start)
    shape = getattr(stage.agent.torso, "map_shape", None)  # type: ignore[attr-defined]
    found = np.stack(weights)  # [T,heads,R]
    cells = found.reshape(*found.shape[:2], *shape[1:]) if shape is not None else found
    save_numbers(path.with_suffix(".npz"), answers, start, show.protocol(), weights=cells)
    note(
        f"{len(pictures)} steps, {found.shape[1]} head{'s' * (found.shape[1] > 1)}; weights: {path.with_suffix('.npz')}"
    )
    return written


def _heads(scene: Scene, weights: np.ndarray, stage: Stage) -> np.ndarray:
    maps = [attention_map(head[None], stage.agent, stage.pool) for head in weights]
    looks = [overlay(scene.canvas, cells, box) for cells, box in maps]
    return panels([scene.shown, *looks], ["the game", *(f"head {k + 1}" for k in range(len(looks)))])
