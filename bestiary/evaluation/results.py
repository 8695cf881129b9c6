"""Results of an evaluation: the games of each task, checkpoint and range of levels, and their statistics.

Results are written to a JSON file and a CSV file.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.envs import lookup_score_range
from bestiary.envs.episode_stats import return_name
from bestiary.evaluation.statistics import format_interval, summarise, summarise_reward_per_step
from bestiary.runs.tables import html_table
from bestiary.step import Episode
from bestiary.utils import safe_files
from bestiary.utils.console import plural
from bestiary.utils.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Maps the name of a quantity (game_return, game_length, episode_return ...) to a result of `summarise`, for example
# {"mean": 3.2, "sd": 1.1, ...}.
Statistics = dict[str, dict[str, Any]]

RESULTS_IN_REPR = 3  # maximum number of results that `repr(Evaluation)` describes


@dataclass(repr=False)
class TaskResult:
    """The games that one checkpoint played in one task and one range of levels, and their statistics."""

    task: str
    episodes: list[Episode]  # episodes of all included games; the episodes of one game follow each other
    checkpoint: int | None = None  # step count; None if only one checkpoint was chosen (no `--checkpoints all`)
    levels: str | None = None  # range of levels, for example "0:500"; None if the task has no levels
    role: str = ""  # how the training used the levels: "train", "valid", "test" or "" (see `level_role`)
    unfinished: int = 0  # number of games that are missing because they did not end or were not started
    statistics: Statistics = field(init=False)

    def __post_init__(self) -> None:
        games = [e for e in self.episodes if e.game_over]
        has_lives = len(games) < len(self.episodes)
        self.statistics = {
            "game_return": summarise([e.game_return for e in games]),
            "game_length": summarise([e.game_length for e in games]),
        }
        if has_lives:
            self.statistics["episode_return"] = summarise([e.episode_return for e in self.episodes], "episodes")
        self._add_true_rewards(games, has_lives)
        if (score_range := lookup_score_range(self.task)) is not None:
            # Scores are normalised returns of the environment's own reward, which may differ from the training reward.
            own_returns = np.array([e.game_measures.get("reward", e.game_return) for e in games])
            self.statistics["normalised_return"] = summarise(score_range.normalise(own_returns))

    def _add_true_rewards(self, games: list[Episode], has_lives: bool) -> None:
        """If there are true rewards, add statistics of the true returns.

        Also add statistics of the reward per step, for the training reward and for each true reward.
        """
        for name in self.true_rewards:
            self.statistics[f"game_{return_name(name)}"] = summarise([e.game_measures[name] for e in games])
            if has_lives:
                values = [e.measures[name] for e in self.episodes]
                self.statistics[f"episode_{return_name(name)}"] = summarise(values, "episodes")
        lengths = np.array([e.game_length for e in games])
        for name in self.reward_names:
            returns = np.array([e.game_measures[name] for e in games])
            self.statistics[f"{name}_reward_per_step"] = summarise_reward_per_step(returns, lengths)

    @property
    def true_rewards(self) -> list[str]:
        """The names of the true rewards: true, true_2 ...

        The list is empty if the run was trained without --reward and --true-reward.
        """
        measures = self.episodes[0].game_measures if self.episodes else {}
        if "training" not in measures:
            return []
        return [name for name in measures if name == "true" or name.startswith("true_")]

    @property
    def reward_names(self) -> list[str]:
        """The names of all rewards: "training", then `true_rewards`. The list is empty if `true_rewards` is empty."""
        return ["training", *self.true_rewards] if self.true_rewards else []

    @property
    def mean(self) -> float:
        """The mean return of the games."""
        return self.statistics["game_return"]["mean"]

    @property
    def labels(self) -> dict[str, Any]:
        """A dict with the keys checkpoint, task, levels and role. Keys without a value are omitted."""
        labels = {"checkpoint": self.checkpoint, "task": self.task, "levels": self.levels, "role": self.role or None}
        return {key: value for key, value in labels.items() if value is not None}

    def __repr__(self) -> str:
        """Return one line with the mean return and the number of games. The episodes are left out."""
        return f"TaskResult({self._describe()})"

    def _describe(self) -> str:
        """Return the labels, the mean return with its 95 % interval, and the number of games."""
        summary = self.statistics["game_return"]
        labels = [self.task]
        if self.levels is not None:
            labels.append(f"levels {self.levels}")
        if self.checkpoint is not None:
            labels.append(f"step {self.checkpoint}")
        interval = "" if summary["ci_low"] is None else f" ({format_interval(summary)})"
        missing = f", {self.unfinished} unfinished" if self.unfinished else ""
        games = plural(summary["n"], "game")
        return f"{' '.join(labels)}: mean return {summary['mean']:.2f}{interval}, n = {games}{missing}"


@dataclass(repr=False)
class Evaluation:
    """All results of an evaluation, and the protocol, which describes how the games were played."""

    protocol: dict[str, Any]
    results: list[TaskResult]
    path: Path | None = None  # path of the JSON file; the CSV file differs only in its suffix
    figure: Path | None = None  # path of the figure; None if only one checkpoint was evaluated

    def __repr__(self) -> str:
        """Return one line with the mean return of the first results. Episodes and protocol are left out."""
        texts = [result._describe() for result in self.results[:RESULTS_IN_REPR]]
        if (others := len(self.results) - len(texts)) > 0:
            texts.append(f"{others} more result{'s' if others > 1 else ''}")
        return f"Evaluation({'; '.join(texts) or 'no results'})"

    def _repr_html_(self) -> str:
        """Return the mean return of each result as an HTML table, for notebooks."""
        rows = []
        for result in self.results:
            summary = result.statistics["game_return"]
            labels = [str(value) for value in result.labels.values()]
            interval = "" if summary["ci_low"] is None else format_interval(summary)
            rows.append([" · ".join(labels), str(summary["n"]), f"{summary['mean']:.2f}", interval])
        return html_table("Evaluation", rows, header=["result", "games", "mean return", "95 % interval"])

    def plot(self) -> "Figure":
        """Return a matplotlib figure that shows the cumulative distribution of the returns of games for each result."""
        with new_figure() as (figure, axes):
            for result in self.results:
                returns = [episode.game_return for episode in result.episodes if episode.game_over]
                axes.ecdf(returns, label=" · ".join(str(value) for value in result.labels.values()))
            axes.set_xlabel("return of a game")
            axes.set_ylabel("fraction of games with at most this return")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        return figure

    @property
    def checkpoints(self) -> list[int]:
        """The step counts of the evaluated checkpoints. The list is empty without `--checkpoints all`."""
        return list(dict.fromkeys(result.checkpoint for result in self.results if result.checkpoint is not None))

    @property
    def unfinished(self) -> int:
        """The number of games that are missing in the results because they did not end or were not started."""
        return sum(result.unfinished for result in self.results)

    @property
    def statistics(self) -> Statistics:
        """The statistics of the only result. Raises ValueError if there are several results."""
        if len(self.results) > 1:
            raise ValueError("several tasks, levels or checkpoints have no common statistics; use `results`")
        return self.results[0].statistics

    @property
    def episodes(self) -> list[Episode]:
        """The episodes of all results."""
        return [episode for result in self.results for episode in result.episodes]

    @property
    def mean(self) -> float:
        """The mean return of the games of the only result. Raises ValueError if there are several results."""
        return self.statistics["game_return"]["mean"]

    @property
    def num_splits(self) -> int:
        """The number of ranges of levels (splits)."""
        return len(self._split_ranges())

    def split_summary(self) -> list[dict[str, Any]]:
        """Return one row for each checkpoint and task, with means over the splits (a split is a range of levels).

        A row has the mean over the training splits, the mean over the test splits, and the standard deviations between
        splits. If the task has a score range, the row also has these statistics of the normalised returns. If there are
        several tasks and all have a score range, a row with the task "all" has these statistics averaged over tasks.
        """
        rows: list[dict[str, Any]] = []
        for checkpoint in dict.fromkeys(result.checkpoint for result in self.results):
            labels = {} if checkpoint is None else {"checkpoint": checkpoint}
            results = [result for result in self.results if result.checkpoint == checkpoint]
            tasks = dict.fromkeys(result.task for result in results)
            for task in tasks:
                own = [result for result in results if result.task == task]
                row = {**labels, "task": task, **_split_means(own, [[result.mean] for result in own], "")}
                if _are_normalised(own):
                    means = [[result.statistics["normalised_return"]["mean"]] for result in own]
                    row |= _split_means(own, means, "normalised_")
                rows.append(row)
            if len(tasks) > 1 and _are_normalised(results):
                splits = [[result for result in results if result.levels == range_] for range_ in self._split_ranges()]
                # Leave out a range that has training levels of one task and test levels of another task.
                splits = [split for split in splits if len({result.role for result in split}) == 1]
                means = [[result.statistics["normalised_return"]["mean"] for result in split] for split in splits]
                first_results = [split[0] for split in splits]
                rows.append({**labels, "task": "all", **_split_means(first_results, means, "normalised_")})
        return rows

    def _split_ranges(self) -> list[str | None]:
        return list(dict.fromkeys(result.levels for result in self.results))

    def save(self, path: Path) -> None:
        """Write the statistics and the protocol to a JSON file, and one row per episode to a CSV file beside it."""
        self.path = path
        content: dict[str, Any] = {}
        if len(self.results) == 1:
            content = {**self.results[0].labels, "statistics": self.statistics}
        else:
            if self.num_splits > 1:
                content["split_summary"] = self.split_summary()
            content["results"] = [{**result.labels, "statistics": result.statistics} for result in self.results]
        content["protocol"] = self.protocol
        safe_files.write_text(path, json.dumps(content, indent=1) + "\n")
        text = io.StringIO(newline="")
        self._write_episodes(csv.writer(text))
        safe_files.write_text(path.with_suffix(".csv"), text.getvalue())

    def _write_episodes(self, writer: Any) -> None:
        first = self.results[0]
        rewards = first.reward_names
        measures = [name for name in first.episodes[0].measures if rewards and name != "level"]
        columns = ["checkpoint", "task", "levels", "game", "env", "level"]
        columns += ["return", "length", "game_return", "game_length", "game_over"]
        columns += [f"game_{return_name(name)}" for name in rewards]
        columns += [return_name(name) if name in rewards else name for name in measures]
        writer.writerow(columns)
        for result in self.results:
            game = 0
            for e in result.episodes:
                level = int(e.measures["level"]) if "level" in e.measures else ""
                row: list[Any] = [result.checkpoint, result.task, result.levels, game, e.env, level]
                row += [e.episode_return, e.length, e.game_return, e.game_length, int(e.game_over)]
                row += [e.game_measures[name] for name in rewards]
                row += [e.measures.get(name, "") for name in measures]
                writer.writerow(row)
                game += e.game_over


def _are_normalised(results: Sequence[TaskResult]) -> bool:
    return all("normalised_return" in result.statistics for result in results)


def _split_means(results: Sequence[TaskResult], means: Sequence[Sequence[float]], prefix: str) -> dict[str, float]:
    """Return the mean over the training splits (key PREFIXtrain) and the mean over the test splits (key PREFIXtest).

    A split is a range of levels. `results[k].role` says whether split k is a training or a test split. The value of
    split k is the mean of the numbers `means[k]`. If several splits have the same role, the standard deviation of their
    values is also returned (keys PREFIXtrain_sd and PREFIXtest_sd).
    """
    summary: dict[str, float] = {}
    for role in ("train", "test"):
        values = [float(np.mean(m)) for result, m in zip(results, means, strict=True) if result.role == role]
        if values:
            summary[prefix + role] = float(np.mean(values))
        if len(values) > 1:
            summary[f"{prefix}{role}_sd"] = float(np.std(values, ddof=1))
    return summary
