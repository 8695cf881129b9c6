"""The registry: canonical names, and vector environments in a user's file."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

from bestiary.envs import VectorEnv, canonical_name, lookup_env, lookup_score_range, make_env
from bestiary.envs.atari_games import list_games
from bestiary.envs.atari_scores import RANDOM_AND_HUMAN_SCORES
from bestiary.envs.rewards.wrapper import RewardConfig, RewardWrapper
from bestiary.utils import trust

# A vector environment that does not inherit from VectorEnv and has only the required attributes and methods.
COUNTER = """
    import numpy as np

    from bestiary.rollout import ActionSpec, ArraySpec, Step

    class Counter:
        observation_spec = {"vector": ArraySpec((1,), "float32")}
        action_spec = ActionSpec(("wait", "count"))
        measures_spec = {"even": ArraySpec((), "float32")}
        tasks = ("counter",)

        def __init__(self, num_envs, seed, *, limit: int = 3):
            self.num_envs, self.limit = num_envs, limit
            self.count = np.zeros(num_envs, np.int64)

        def _step(self, done):
            n = self.num_envs
            observation = {"vector": self.count[:, None].astype(np.float32)}
            zeros = np.zeros(n, bool)
            even = {"even": (self.count % 2 == 0).astype(np.float32)}
            return Step(observation, np.ones(n, np.float32), done, zeros, done.copy(), np.zeros(n, np.int64), even)

        def reset(self):
            self.count[:] = 0
            return self._step(np.ones(self.num_envs, bool))

        def send(self, actions):
            self.count += actions

        def recv(self):
            done = self.count >= self.limit
            self.count[done] = 0
            return self._step(done)
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    file = tmp_path / "my_env.py"
    file.write_text(textwrap.dedent(COUNTER))
    return f"{file}:Counter"


def test_a_users_vector_environment_gets_the_default_capabilities(name: str) -> None:
    pool = make_env(name, num_envs=2, limit=2)
    assert isinstance(pool, VectorEnv)
    assert (pool.frames_per_step, pool.saveable, pool.save(), dict(pool.frame_stacks)) == (1, False, {}, {})
    assert pool.unwrapped is pool
    pool.reset()
    pool.send(np.array([1, 0]))
    assert not pool.recv().done.any()
    pool.send(np.array([1, 1]))
    step = pool.recv()
    assert step.done.tolist() == [True, False]
    assert step.observation["vector"].tolist() == [[0], [1]]
    pool.close()


def test_the_options_class_of_a_users_environment_is_the_same_in_each_lookup(name: str) -> None:
    trust.named_by_user(name)
    assert lookup_env(name).options is lookup_env(name).options
    assert lookup_env(name).default_steps == VectorEnv.default_steps


def test_a_scalar_measure_of_a_users_environment_is_a_reward_component(name: str) -> None:
    pool = RewardWrapper(make_env(name, num_envs=2), RewardConfig("even=2"))
    assert not isinstance(pool.unwrapped, RewardWrapper)
    assert pool.limit == 3  # attributes of the wrapped environment stay accessible
    pool.reset()
    pool.send(np.array([1, 0]))
    assert pool.recv().reward.tolist() == [0, 2]


def test_canonical_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(name.rpartition(":")[0])
    monkeypatch.chdir(path.parent)
    assert canonical_name("my_env.py:Counter") == name
    assert canonical_name("procgen/maze") == "procgen/maze:hard"
    assert canonical_name("atari/Pong") == "atari/Pong"


def test_human_normalised_scores_of_atari_games() -> None:
    """0 is the random policy, 1 the human. 57 games have published scores."""
    pong = lookup_score_range("atari/Pong")
    assert pong is not None
    assert pong.normalise(-20.7) == 0
    assert pong.normalise(14.6) == pytest.approx(1)
    np.testing.assert_allclose(pong.normalise(np.array([-20.7, 14.6])), [0, 1])
    assert "human" in pong.meaning
    assert len(RANDOM_AND_HUMAN_SCORES) == 57
    assert set(RANDOM_AND_HUMAN_SCORES) <= set(list_games())
    assert all(human > random for random, human in RANDOM_AND_HUMAN_SCORES.values())
    assert lookup_score_range("atari/AirRaid") is None


@pytest.mark.parametrize("name", ["toy/catch", "warehouse:mini", "gymnasium/CartPole-v1", "no/such", "missing.py:Env"])
def test_other_environments_have_no_score_range(name: str) -> None:
    assert lookup_score_range(name) is None  # the file of a user's environment is not imported
