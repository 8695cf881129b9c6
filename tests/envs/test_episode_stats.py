"""EpisodeTracker against a slow implementation that keeps all steps and sums them at the end of an episode."""

import numpy as np
import pytest

from bestiary.envs.episode_stats import EpisodeTracker
from bestiary.rollout import ArraySpec, Episode, Step

N = 5
TASKS = ("easy", "hard")
MEASURES = {"score": ArraySpec((), "float32"), "lives": ArraySpec((), "int64"), "ram": ArraySpec((128,), "uint8")}


def random_step(rng: np.random.Generator, end_probability: float) -> Step:
    """Return a step in which lives end at random, a third of them with their game. Multiples of 0.5 have exact sums."""
    done = rng.random(N) < end_probability
    game_over = done & (rng.random(N) < 1 / 3)
    return Step(
        observation={},
        reward=rng.integers(-4, 5, N).astype(np.float32) / 2,
        done=done,
        truncated=game_over & (rng.random(N) < 1 / 2),
        game_over=game_over,
        task=rng.integers(2, size=N),
        measures={
            "score": rng.integers(0, 9, N).astype(np.float32) / 2,
            "lives": rng.integers(0, 5, N),
            "ram": rng.integers(0, 256, (N, 128), dtype=np.uint8),
        },
    )


class SlowTracker:
    """Keeps all steps of the current life and of the current game of one environment."""

    def __init__(self, env: int):
        self.env = env
        self.life: list[Step] = []
        self.game: list[Step] = []

    def add(self, step: Step, at: int) -> list[Episode]:
        i = self.env
        self.life.append(step)
        self.game.append(step)
        if not step.done[i]:
            return []
        episode = Episode(
            step=at,
            task=TASKS[step.task[i]],
            episode_return=sum(float(s.reward[i]) for s in self.life),
            length=len(self.life),
            game_return=sum(float(s.reward[i]) for s in self.game),
            game_length=len(self.game),
            game_over=bool(step.game_over[i]),
            env=i,
            measures={name: sum(float(s.measures[name][i]) for s in self.life) for name in ("score", "lives")},
            game_measures={name: sum(float(s.measures[name][i]) for s in self.game) for name in ("score", "lives")},
        )
        self.life = []
        self.game = [] if step.game_over[i] else self.game
        return [episode]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end_probability", [0.02, 0.3, 1.0])
def test_the_tracker_equals_the_slow_implementation(seed: int, end_probability: float) -> None:
    rng = np.random.default_rng(seed)
    tracker = EpisodeTracker(N, TASKS, MEASURES)
    slow_trackers = [SlowTracker(i) for i in range(N)]
    ended = []
    for t in range(1, 301):
        step = random_step(rng, end_probability)
        episodes = tracker.add(step, at=t * N)
        assert episodes == [episode for slow in slow_trackers for episode in slow.add(step, at=t * N)]
        ended += episodes
    assert len({episode.env for episode in ended}) == N
    assert {episode.game_over for episode in ended} == {True, False}


def test_measures_with_a_shape_are_not_summed() -> None:
    step = random_step(np.random.default_rng(0), 1.0)
    for episode in EpisodeTracker(N, TASKS, MEASURES).add(step, at=N):
        assert episode.measures.keys() == {"score", "lives"}


def test_the_return_of_a_game_is_the_sum_of_its_lives() -> None:
    rng = np.random.default_rng(3)
    tracker = EpisodeTracker(N, TASKS, MEASURES)
    lives: dict[int, list[Episode]] = {i: [] for i in range(N)}
    games = 0
    for t in range(400):
        for episode in tracker.add(random_step(rng, 0.1), at=t):
            lives[episode.env].append(episode)
            assert episode.game_return == sum(life.episode_return for life in lives[episode.env])
            assert episode.game_length == sum(life.length for life in lives[episode.env])
            if episode.game_over:
                games += 1
                lives[episode.env] = []
    assert games > 20
