"""What an evaluation found: the games of each part (a task, a checkpoint, a range of levels), in numbers, files and tables."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bestiary.console import note, stdout
from bestiary.envs.procgen import normalised
from bestiary.rollout import Episode
from bestiary.runtime.episodes import return_name

Statistics = dict[str, dict[str, float]]


@dataclass
class Part:
    """The games of one task, at one checkpoint, on one range of levels."""

    task: str
    episodes: list[Episode]  # every life of every game that counts; lives of a game follow each other
    checkpoint: int | None = None
    levels: str | None = None
    role: str = ""  # of the levels: train, valid or test
    given_up: int = 0  # games
    statistics: Statistics = field(init=False)

    def __post_init__(self) -> None:
        games = [e for e in self.episodes if e.game_over]
        self.statistics = {
            "game": summarise([e.game_return for e in games]),
            "game_length": summarise([e.game_length for e in games]),
        }
        if len(games) < len(self.episodes):
            self.statistics["life"] = summarise([e.ret for e in self.episodes])
        self._add_rewards(games, several_lives=len(games) < len(self.episodes))
        if self.task.startswith("procgen/") and normalised(self.task, 0) is not None:
            own = [e.game_measures.get("reward", e.game_return) for e in games]  # whatever is trained on
            self.statistics["normalised"] = summarise([normalised(self.task, value) or 0.0 for value in own])

    def _add_rewards(self, games: list[Episode], several_lives: bool) -> None:
        """Where what is trained on is not the environment's own reward: each true one, and both for each step."""
        for name in self.channels:
            self.statistics[name] = summarise([e.game_measures[name] for e in games])
            if several_lives:
                self.statistics[f"life_{name}"] = summarise([e.measures[name] for e in self.episodes])
        for name in ("trained", *self.channels) if self.channels else ():
            lengths = np.array([e.game_length for e in games])
            self.statistics[f"{name}_per_step"] = _rates(np.array([e.game_measures[name] for e in games]), lengths)

    @property
    def channels(self) -> list[str]:
        """The true rewards."""
        known = self.episodes[0].game_measures if self.episodes else {}
        return [name for name in known if name == "true" or name.startswith("true_")] if "trained" in known else []

    @property
    def mean(self) -> float:
        return self.statistics["game"]["mean"]

    @property
    def label(self) -> dict[str, Any]:
        named = {"checkpoint": self.checkpoint, "task": self.task, "levels": self.levels, "role": self.role or None}
        return {key: value for key, value in named.items() if value is not None}


@dataclass
class Evaluation:
    protocol: dict[str, Any]
    parts: list[Part]
    path: Path | None = None  # of the JSON file; the CSV is beside it
    figure: Path | None = None  # where there are several checkpoints

    @property
    def checkpoints(self) -> list[int]:
        """Those that were played, where it is said of each part."""
        return list(dict.fromkeys(part.checkpoint for part in self.parts if part.checkpoint is not None))

    @property
    def statistics(self) -> Statistics:
        """Of all games, where there is one part; each part has its own."""
        if len(self.parts) > 1:
            raise ValueError("tasks and levels have no common mean: see `parts`")
        return self.parts[0].statistics

    @property
    def episodes(self) -> list[Episode]:
        return [episode for part in self.parts for episode in part.episodes]

    @property
    def mean(self) -> float:
        """Mean return of whole games."""
        return self.statistics["game"]["mean"]

    def over_splits(self) -> list[dict[str, Any]]:
        """At each checkpoint, for each task and for all together, the means on its training levels and on the others: mean and
        deviation over those splits. Normalised where there are constants; together only then."""
        rows: list[dict[str, Any]] = []
        for checkpoint in dict.fromkeys(part.checkpoint for part in self.parts):
            at = {} if checkpoint is None else {"checkpoint": checkpoint}
            parts = [part for part in self.parts if part.checkpoint == checkpoint]
            tasks = dict.fromkeys(part.task for part in parts)
            for task in tasks:
                own = [part for part in parts if part.task == task]
                rows.append({**at, "task": task, **_split_means(own, [[part.mean] for part in own], "")})
                if all("normalised" in part.statistics for part in own):
                    means = [[part.statistics["normalised"]["mean"]] for part in own]
                    rows[-1] |= _split_means(own, means, "normalised_")
            if len(tasks) > 1 and all("normalised" in part.statistics for part in parts):
                columns = [[p for p in parts if p.levels == one.levels] for one in self._splits()]
                columns = [column for column in columns if len({part.role for part in column}) == 1]  # else of no kind
                means = [[part.statistics["normalised"]["mean"] for part in column] for column in columns]
                rows.append({**at, "task": "all", **_split_means([c[0] for c in columns], means, "normalised_")})
        return rows

    def _splits(self) -> list[Part]:
        return list({part.levels: part for part in reversed(self.parts)}.values())[::-1]

    def save(self, path: Path) -> None:
        self.path = path
        found: dict[str, Any] = {"protocol": self.protocol}
        if len(self.parts) == 1:
            found = {**self.parts[0].label, "statistics": self.statistics, **found}
        else:
            found = {"parts": [{**part.label, "statistics": part.statistics} for part in self.parts], **found}
            if len(self._splits()) > 1:
                found = {"over_splits": self.over_splits(), **found}
        path.write_text(json.dumps(found, indent=1) + "\n")
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.writer(file)
            names = ["checkpoint", "task", "levels", "game", "env", "level"]
            rewards = ["trained", *self.parts[0].channels] if self.parts[0].channels else []
            measured = [name for name in self.parts[0].episodes[0].measures if rewards and name != "level"]
            sums = [*(f"game_{return_name(name)}" for name in rewards)]
            sums += [return_name(name) if name in rewards else name for name in measured]
            writer.writerow([*names, "return", "length", "game_return", "game_length", "game_over", *sums])
            for part in self.parts:
                game = 0
                for e in part.episodes:
                    level = int(e.measures["level"]) if "level" in e.measures else ""
                    where = [part.checkpoint, part.task, part.levels, game, e.env, level]
                    more = [e.game_measures[name] for name in rewards] + [e.measures.get(name, "") for name in measured]
                    writer.writerow([*where, e.ret, e.length, e.game_return, e.game_length, int(e.game_over), *more])
                    game += e.game_over

    def show(self) -> None:
        p = self.protocol
        at = f" at step {p['checkpoint_steps']:,}" if "checkpoint_steps" in p else ""
        title = f"{p['run']}{at}, {p['policy']}"
        if len(self.parts) == 1 and "trained_on" in p and p["environment"] != p["trained_on"]:
            title += f", in {self.parts[0].task}"
        if len(self.parts) == 1 and self.parts[0].levels is not None:
            title += f", levels {self.parts[0].levels}{f' ({self.parts[0].role})' * bool(self.parts[0].role)}"
        stdout.print(self._one(title) if len(self.parts) == 1 else self._many(title))
        if len(self._splits()) > 1:
            stdout.print(self._summary())
        if self.path is not None:
            note(f"written: {self.path}, .csv and .png" if self.figure else f"written: {self.path} and .csv")

    def _one(self, title: str) -> Table:
        table = _table(title, "", "n", *COLUMNS)
        for name, s in self.statistics.items():
            table.add_row(self._called(name), f"{s['n']:.0f}", *_cells(s, 4 if name.endswith("_per_step") else 2))
        return table

    def _called(self, name: str) -> str:
        """What a statistic is of, in words."""
        trained = "trained return" if self.parts[0].channels else "return"
        if name in NAMES:
            return NAMES[name].replace("return", trained) if name in ("game", "life") else NAMES[name]
        whose, of = ("of a life", name.removeprefix("life_")) if name.startswith("life_") else ("of a game", name)
        if of.endswith("_per_step"):
            whose, of = "a step", of.removesuffix("_per_step")
        return f"{return_name(of).replace('_', ' ')} {whose}"

    def _many(self, title: str) -> Table:
        keys = [key for key in ("checkpoint", "task", "levels", "role") if any(key in p.label for p in self.parts)]
        scaled = any("normalised" in part.statistics for part in self.parts)
        true = [name for name in ("true",) if all(name in part.statistics for part in self.parts)]
        table = _table(title, *keys, "games", *COLUMNS, *(["normalised"] if scaled else []), *true)
        for part in self.parts:
            label = [f"{part.label.get(key, '')}" for key in keys]
            s, share = part.statistics["game"], part.statistics.get("normalised")
            more = [f"{share['mean']:.3f}" if share else ""] if scaled else []
            more += [f"{part.statistics[name]['mean']:.2f}" for name in true]
            table.add_row(*label, f"{s['n']:.0f}", *_cells(s), *more)
        return table

    def _summary(self) -> Table:
        rows = self.over_splits()
        keys = [key for key in ("train", "test", "normalised_train", "normalised_test") if any(key in r for r in rows)]
        named = [key for key in ("checkpoint", "task") if key in rows[0]]
        table = _table("over the splits: mean, and its deviation from split to split", *named, *keys)
        for row in rows:
            label = [f"{row[key]}" for key in named]
            cells = [f"{row[key]:.3f}" if key in row else "" for key in keys]
            spread = [f" ± {row[f'{key}_sd']:.3f}" if f"{key}_sd" in row else "" for key in keys]
            table.add_row(*label, *(cell + more for cell, more in zip(cells, spread, strict=True)))
        return table


COLUMNS = ("mean", "95% interval", "sd", "median", "min", "max")
NAMES = {
    "game": "return of a game",
    "life": "return of a life",
    "game_length": "steps of a game",
    "normalised": "normalised return",
}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "task", "levels", "role") else "right")
    return table


def _cells(s: dict[str, float], digits: int = 2) -> list[str]:
    mean, sd, median, low, high = (f"{s[key]:.{digits}f}" for key in ("mean", "sd", "median", "min", "max"))
    return [mean, f"{s['ci_low']:.{digits}f} to {s['ci_high']:.{digits}f}", sd, median, low, high]


def _split_means(parts: Sequence[Part], means: Sequence[Sequence[float]], prefix: str) -> dict[str, float]:
    """Of each role, the mean over its splits, each the mean of some numbers; with a deviation where it has several."""
    found: dict[str, float] = {}
    for role in ("train", "test"):
        own = [float(np.mean(m)) for part, m in zip(parts, means, strict=True) if part.role == role]
        if own:
            found[prefix + role] = float(np.mean(own))
        if len(own) > 1:
            found[f"{prefix}{role}_sd"] = float(np.std(own, ddof=1))
    return found


def per_step(returns: np.ndarray, lengths: np.ndarray) -> float:
    """What a step brings: of all games together, because in a mean of their rates a short game would count like a long one."""
    return float(returns.sum() / lengths.sum())


def _rates(returns: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """What a step brings, with an interval over games; spread and extremes are those of games' own rates."""
    found = summarise(list(returns / lengths))
    if found["ci_low"] < found["ci_high"]:
        import scipy.stats

        interval = scipy.stats.bootstrap(
            (returns, lengths),
            lambda r, n, axis=-1: r.sum(axis) / n.sum(axis),
            paired=True,
            n_resamples=2000,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
        found |= {"ci_low": float(interval.low), "ci_high": float(interval.high)}
    return found | {"mean": per_step(returns, lengths)}


def summarise(values: Sequence[float] | Sequence[int]) -> dict[str, float]:
    """Mean with a 95 % bootstrap interval, spread and extremes."""
    array = np.asarray(values, np.float64)
    low = high = float(array.mean())
    if len(array) > 1 and array.std() > 0:
        import scipy.stats  # here, because it takes a second to import, in every process of every run

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
