"""How good is an agent? Whole games in a pool of their own, with the whole protocol written down beside the result.

Every environment plays the same number of games (or one more), and exactly those count: taking the first games to finish
instead would favour short ones.
"""

import csv
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
from rich.progress import Progress
from rich.table import Table

from bestiary import __version__
from bestiary.analysis.play import play
from bestiary.console import interactive, note, stderr, stdout, warn
from bestiary.envs.pool import Pool
from bestiary.errors import RunError
from bestiary.rollout import Episode, Step
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run
from bestiary.runtime.episodes import EpisodeCounter


@dataclass
class Evaluation:
    protocol: dict[str, Any]
    episodes: list[Episode]  # every life of every game that counts
    path: Path | None = None  # of the JSON file; the CSV is beside it
    statistics: dict[str, dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        games = [e for e in self.episodes if e.game_over]
        self.statistics = {
            "game": summarise([e.game_return for e in games]),
            "game_length": summarise([e.game_length for e in games]),
        }
        if len(games) < len(self.episodes):
            self.statistics["life"] = summarise([e.ret for e in self.episodes])

    @property
    def mean(self) -> float:
        """Mean return of whole games."""
        return self.statistics["game"]["mean"]

    def save(self, path: Path) -> None:
        self.path = path
        path.write_text(json.dumps({"statistics": self.statistics, "protocol": self.protocol}, indent=1) + "\n")
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["game", "env", "return", "length", "game_return", "game_length", "game_over"])
            game = 0
            for e in self.episodes:  # lives of a game follow each other
                writer.writerow([game, e.env, e.ret, e.length, e.game_return, e.game_length, int(e.game_over)])
                game += e.game_over

    def show(self) -> None:
        p = self.protocol
        at = f" at step {p['checkpoint_steps']:,}" if "checkpoint_steps" in p else ""
        table = Table(title=f"{p['run']}{at}, {p['policy']}")
        for column in ("", "n", "mean", "95% interval", "sd", "median", "min", "max"):
            table.add_column(column, justify="right" if column else "left")
        names = {"game": "return of a game", "life": "return of a life", "game_length": "steps of a game"}
        for name, s in self.statistics.items():
            cells = (s["mean"], s["sd"], s["median"], s["min"], s["max"])
            mean, sd, median, low, high = (f"{value:.2f}" for value in cells)
            table.add_row(
                names[name], f"{s['n']:.0f}", mean, f"{s['ci_low']:.2f} to {s['ci_high']:.2f}", sd, median, low, high
            )
        stdout.print(table)
        if self.path is not None:
            note(f"written: {self.path} and .csv")


def summarise(values: list[float] | list[int]) -> dict[str, float]:
    """Mean with a 95 % bootstrap interval, spread and extremes."""
    array = np.asarray(values, np.float64)
    low = high = float(array.mean())
    if len(array) > 1 and array.std() > 0:
        interval = scipy.stats.bootstrap(
            (array,), np.mean, n_resamples=2000, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return {
        "n": len(array),
        "mean": float(array.mean()),
        "ci_low": low,
        "ci_high": high,
        "sd": float(array.std(ddof=1)) if len(array) > 1 else 0.0,
        "median": float(np.median(array)),
        "min": float(array.min()),
        "max": float(array.max()),
        "distinct": len(np.unique(array)),
    }


def evaluate(
    run: Run,
    *,
    episodes: int = 100,
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    num_envs: int = 32,
    max_steps: int = 27_000,
) -> Evaluation:
    """Play `episodes` whole games with a run's agent and write the result into the run's folder.

    A game is given up after `max_steps` decisions: some environments never end. Those do not count, and are reported."""
    config = run.config
    chosen = checkpoints.choose(run.path, checkpoint)
    if checkpoint is not None and chosen.steps != checkpoint:
        note(f"the checkpoint nearest to step {checkpoint} is at {chosen.steps}")
    policy = "greedy" if greedy else "sampled"
    path = run.new_path("evaluations", f"{chosen.steps:012d}-{policy}-{episodes}", ".json")  # before any work
    agent = run.agent(chosen.steps)
    streams = np.random.SeedSequence([config.training.seed, 1, seed]).spawn(2)
    pool = config.make_pool(min(num_envs, episodes), streams[0])
    moments = play(agent, pool, greedy=greedy, seed=int(streams[1].generate_state(1)[0]))
    played, unfinished = _play_games((step for step, _ in moments), pool, episodes, max_steps)
    protocol = {
        "run": run.name,
        "environment": list(config.envs),
        "environment_options": config.tables()["env"],
        "checkpoint_steps": chosen.steps,
        "policy": policy,
        **_protocol(pool, episodes, unfinished, max_steps, seed),
        "training_seed": config.training.seed,
    }
    evaluation = Evaluation(protocol, played)
    evaluation.save(path)
    return evaluation


def evaluate_player(
    name: str,
    env: str,
    options: dict[str, Any],
    *,
    episodes: int = 100,
    seed: int = 0,
    num_envs: int = 32,
    max_steps: int = 27_000,
) -> Evaluation:
    """The same for a scripted player, into a folder below runs/ that is named for it."""
    from bestiary.envs import make
    from bestiary.envs.players import make_player
    from bestiary.envs.players import play as play_scripted

    streams = np.random.SeedSequence([0, 1, seed]).spawn(2)
    pool = make(env, min(num_envs, episodes), streams[0], **options)
    player = make_player(name, pool, int(streams[1].generate_state(1)[0]))
    folder = Path("runs") / f"scripted-{name}-{env.replace(':', '-')}" / "evaluations"
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoints.unused(folder / f"{episodes}.json")
    played, unfinished = _play_games(play_scripted(player, pool), pool, episodes, max_steps)
    protocol = {
        "run": f"scripted:{name}",
        "environment": [env],
        "environment_options": asdict(pool.options),  # type: ignore[attr-defined]
        "policy": "scripted",
        **_protocol(pool, episodes, unfinished, max_steps, seed),
    }
    evaluation = Evaluation(protocol, played)
    evaluation.save(path)
    return evaluation


def _protocol(pool: Pool, episodes: int, unfinished: int, max_steps: int, seed: int) -> dict[str, Any]:
    return {
        "games": episodes,
        "games_given_up": unfinished,
        "max_steps": max_steps,
        "num_envs": pool.num_envs,
        "games_per_env": "equal, each environment's first",
        "seed": seed,
        "interval": "95 % bootstrap of the mean, 2000 resamples",
        "bestiary": __version__,
    }


def _play_games(steps: Iterator[Step], pool: Pool, episodes: int, max_steps: int) -> tuple[list[Episode], int]:
    """The episodes of so many whole games, by environment, and how many games were given up. Closes the pool."""
    n = pool.num_envs
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)  # games that environment i owes
    counter = EpisodeCounter(n, pool.tasks, pool.measures_spec)
    played = np.zeros(n, np.int64)
    result: list[Episode] = []
    try:
        next(steps)
        with Progress(console=stderr, disable=not interactive(), transient=True) as progress:
            bar, age, said = progress.add_task("evaluating", total=episodes), np.zeros(n, np.int64), time.monotonic()
            while ((played < quota) & (age < max_steps)).any():
                step = next(steps)
                # of the running game; once given up, for good
                age = np.where(step.game_over & (age < max_steps), 0, age + 1)
                for episode in counter.add(step, 0):
                    if played[episode.env] < quota[episode.env] and age[episode.env] < max_steps:
                        result.append(episode)
                        played[episode.env] += episode.game_over
                progress.update(bar, completed=int(played.sum()))
                if not interactive() and time.monotonic() - said > 10:
                    said = time.monotonic()
                    note(f"evaluating: {played.sum()} of {episodes} games")
    finally:
        pool.close()
    unfinished = episodes - int(played.sum())
    if unfinished:
        warn(f"{unfinished} of {episodes} games had not ended after {max_steps} steps and do not count")
    if unfinished == episodes:
        raise RunError(f"no game ended within {max_steps} steps (--max-steps)")
    return sorted(result, key=lambda e: e.env), unfinished
