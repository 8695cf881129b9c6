"""The Python API: acting in an own loop, tables and figures of a run, and environments for other programs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import env_checker
from gymnasium.utils.performance import benchmark_vector_step
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

import bestiary
from bestiary.agents.memories import MEMORIES
from bestiary.evaluation.results import Evaluation
from bestiary.runs.recordings import open_recording
from bestiary.utils.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"

VECTOR_FILE = """
import gymnasium
from gymnasium.vector import AutoresetMode
def make(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync",
                              vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP})
"""

# One environment of each family, and of each kind of user's file. Short time limits, so that episodes are truncated.
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "toy/recall": {"time_limit": 7, "delay": 8},
    "toy/catch": {},
    "warehouse": {},
    "warehouse:memory": {"observation": "image"},
    "gymnasium/CartPole-v1": {},
    "gymnasium/FrozenLake-v1": {},
    "atari/Breakout": {"time_limit": 60},
    "procgen/maze:easy": {},
    f"{EXAMPLES}/maze_env.py:Maze": {},
    f"{EXAMPLES}/signal_env.py:Signal": {},
    "vector.py:make": {},
}


@pytest.fixture
def make_vec(tmp_path: Path) -> Callable[..., Any]:
    """Return `bestiary.make_vec` with the options of ENVIRONMENTS."""
    (tmp_path / "vector.py").write_text(VECTOR_FILE)

    def make(name: str, num_envs: int, **options: Any) -> Any:
        return bestiary.make_vec(name, num_envs=num_envs, **ENVIRONMENTS[name], **options)

    return make


# --- make_vec ---


class FirstRow(gymnasium.Env):
    """The only row of a vector environment, for Gymnasium's checks of single environments."""

    def __init__(self, env: Any):
        self.env = env
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        observation, info = self.env.reset(seed=seed, options=options)
        return observation[0], info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step([action])
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_vector_environments_pass_the_checks_of_gymnasium(make_vec: Callable[..., Any], name: str) -> None:
    env = make_vec(name, 2)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert env.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.SAME_STEP
    env_checker.check_reset_seed_determinism(env)
    env_checker.check_reset_options(env)
    env_checker.check_reset_return_type(env)
    env_checker.check_seed_deprecation(env)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    assert benchmark_vector_step(env, target_duration=0) > 0
    env.close()
    single = make_vec(name, 1)
    env_checker.check_env(FirstRow(single), skip_render_check=True)
    single.close()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_wrappers_of_gymnasium_count_the_episodes(make_vec: Callable[..., Any], name: str) -> None:
    env = make_vec(name, 3, seed=4)
    statistics = DictInfoToList(RecordEpisodeStatistics(env))
    statistics.reset()
    rng = np.random.default_rng(0)
    returns, lengths, ended = np.zeros(3), np.zeros(3, int), 0
    for _ in range(400):
        _, reward, terminated, truncated, infos = statistics.step(rng.integers(env.single_action_space.n, size=3))
        returns += reward
        lengths += 1
        assert not (terminated & truncated).any()
        for row in range(3):
            assert ("final_obs" in infos[row]) == truncated[row]
            if truncated[row]:
                assert env.single_observation_space.contains(infos[row]["final_obs"])
            if terminated[row] or truncated[row]:
                assert infos[row]["episode"]["r"] == pytest.approx(returns[row], abs=1e-4)
                assert infos[row]["episode"]["l"] == lengths[row]
                returns[row] = lengths[row] = 0
                ended += 1
        if ended > 20:
            break
    assert ended or name == "procgen/maze:easy"
    env.close()


def test_reset_with_a_seed_repeats_the_first_games(make_vec: Callable[..., Any]) -> None:
    env = make_vec("toy/catch", 4, seed=5)

    def play() -> list[np.ndarray]:
        return [env.step(np.full(4, t % 3))[0] for t in range(30)]

    env.reset()
    first = play()
    env.reset()
    other = play()
    env.reset(seed=5)
    np.testing.assert_array_equal(play(), first)
    assert (np.array(other) != np.array(first)).any()


def test_invalid_actions_and_render_modes_are_refused(make_vec: Callable[..., Any]) -> None:
    env = make_vec("toy/catch", 2)
    with pytest.raises(UserError, match="reset first"):
        env.step([0, 0])
    env.reset()
    for actions in ([0, 3], [0], [0.5, 1.0]):
        with pytest.raises(ValueError, match=r"2 integers in 0\.\.2"):
            env.step(actions)
    assert env.render() is None
    with pytest.raises(UserError, match="render_mode='human'"):
        bestiary.make_vec("toy/catch", render_mode="human")
    with pytest.raises(UserError, match="time_limit"):
        bestiary.make_vec("warehouse", time_limits=3)
    images = bestiary.make_vec("warehouse", num_envs=2, render_mode="rgb_array")
    images.reset()
    frames = images.render()
    assert frames is not None
    assert [frame.shape[2] for frame in frames] == [3, 3]


# --- policy ---


def assert_same_games(run: bestiary.Run, games: int, num_envs: int, **options: Any) -> None:
    """Evaluate a run, and check that `Policy.act` takes the same actions as the evaluation in an own loop."""
    evaluation = bestiary.evaluate(run, episodes=games, num_envs=num_envs, seed=3, record=True, **options)
    for task, result in enumerate(evaluation.results):
        (path,) = run.path.glob(f"recordings/*{result.task.rsplit(':')[-1].rsplit('/')[-1]}*.json")
        recorded = open_recording(path).actions
        env = options.get("env", (run.config.envs[task],))[0] if len(run.config.envs) == 1 else run.config.envs[task]
        policy = run.policy(greedy=options.get("greedy", False), seed=3, env=env)
        vec = run.make_vec(num_envs, seed=3, env=env)
        observation, _ = vec.reset()
        reward = done = None
        returns = []
        total = np.zeros(num_envs)
        for t, expected in enumerate(recorded):
            actions = policy.act(observation, reward=reward, done=done)
            np.testing.assert_array_equal(actions, expected, err_msg=f"step {t}")
            observation, reward, terminated, truncated, _ = vec.step(actions)
            done = terminated | truncated
            total += reward
            returns += [*total[done]]
            total[done] = 0
        vec.close()
        assert len(returns) >= games
        mine = sorted(np.round(returns, 4))
        assert set(np.round([e.game_return for e in result.episodes if e.game_over], 4)) <= set(mine)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_policy_takes_the_actions_of_an_evaluation(memory: str) -> None:
    options: dict[str, Any] = {"delay": 5, "run_dir": "r", "steps": 200, "runtime": "serial", "num_envs": 4}
    run = bestiary.train("toy/recall", memory=memory, batch_size=4, **options)
    assert_same_games(run, games=100, num_envs=8)


def test_a_greedy_policy_of_an_agent_that_keeps_the_last_reward_between_episodes() -> None:
    options: dict[str, Any] = {"run_dir": "r", "steps": 200, "runtime": "serial", "num_envs": 4, "batch_size": 4}
    run = bestiary.train("toy/catch", agent={"name": "basic", "reset_inputs": False}, memory="lstm", **options)
    assert_same_games(run, games=100, num_envs=7, greedy=True)


MAZES = """
import gymnasium, numpy as np
from gymnasium.spaces import Dict, Box, Discrete
class Left(gymnasium.Env):
    '''Walk `length` cells to the left. Images are [H,W,C], so they have to be converted.'''
    side = 0
    observation_space = Dict({"view": Box(0, 255, (2, 5, 3), np.uint8), "clock": Discrete(10)})
    action_space = Discrete(2)
    def look(self):
        view = np.zeros((2, 5, 3), np.uint8)
        view[:, self.cell, self.side] = 255
        return {"view": view, "clock": np.int64(self.clock)}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell, self.clock = int(self.np_random.integers(1, 4)), 0
        return self.look(), {}
    def step(self, action):
        self.clock += 1
        self.cell += 1 if action else -1
        ended = self.cell in (0, 4)
        return self.look(), float(ended and (self.cell == 4) == self.side), ended, self.clock == 9, {}
class Right(Left):
    side = 1
"""


@pytest.fixture
def two_mazes(tmp_path: Path) -> bestiary.Run:
    """An agent of two tasks, with a critic per task and a memory, after a short training."""
    (tmp_path / "mazes.py").write_text(MAZES)
    options: dict[str, Any] = {"run_dir": "two", "steps": 400, "runtime": "serial", "num_envs": 4, "batch_size": 4}
    return bestiary.train("mazes.py:Left", "mazes.py:Right", memory="gru", torso="mlp", critic="popart", **options)


def test_a_policy_plays_each_of_several_tasks(two_mazes: bestiary.Run) -> None:
    assert_same_games(two_mazes, games=100, num_envs=8)


def test_a_policy_accepts_the_observations_of_the_gymnasium_environment(two_mazes: bestiary.Run) -> None:
    """One environment without batch axis, and an own loop with `reset`."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("mazes", "mazes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    raw = module.Right()
    vec = two_mazes.make_vec(1, env="mazes.py:Right")
    one, many = (two_mazes.policy(greedy=True, env="mazes.py:Right") for _ in range(2))
    observation, _ = raw.reset(seed=3)
    converted, _ = vec.reset(seed=0)
    while not np.array_equal(converted["image"][0], observation["view"].transpose(2, 0, 1)):
        converted, _ = vec.reset()
    reward, done = 0.0, True
    for _ in range(30):
        action = one.act(observation, reward=reward, done=done)
        assert action.shape == ()
        batch = {
            "image": observation["view"].transpose(2, 0, 1)[None],
            "vector": np.eye(10, dtype=np.float32)[[observation["clock"]]],
        }
        assert many.act(batch, reward=[reward], done=[done]) == [action]
        observation, reward, terminated, truncated, _ = raw.step(action)
        done = terminated or truncated
        if done:
            observation, _ = raw.reset()


def test_reset_of_rows_equals_done() -> None:
    options: dict[str, Any] = {"run_dir": "r", "steps": 100, "runtime": "serial", "num_envs": 4, "batch_size": 4}
    run = bestiary.train("toy/recall", memory="lstm", **options)
    with_done, with_rows, without = (run.policy(seed=1) for _ in range(3))
    rng = np.random.default_rng(0)
    actions = []
    for t in range(40):
        observation, reward = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=3)
        if t == 20:
            with_rows.reset([0, 2])
        done = np.array([True, False, True]) if t == 20 else None
        actions.append([with_done.act(observation, reward=reward, done=done)])
        actions[-1].append(with_rows.act(observation, reward=reward))
        without.act(observation, reward=reward)
    np.testing.assert_array_equal([a[0] for a in actions], [a[1] for a in actions])
    states = [policy.runner.state for policy in (with_done, with_rows, without) if policy.runner is not None]
    assert all((a == b).all() for a, b in zip(states[0], states[1], strict=True))
    assert any((a != b).any() for a, b in zip(states[0], states[2], strict=True))
    with pytest.raises(UserError, match=r"2 observations.*3 environments.*reset\(\)"):
        with_done.act(observation[:2], reward=reward[:2])
    with_done.reset()
    assert with_done.act(observation[:2]).shape == (2,)
    with pytest.raises(UserError, match="there are 3 environments"):
        with_rows.reset(5)


def test_wrong_observations_are_refused_and_a_missing_reward_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    policy = bestiary.load("zoo/pong").policy(greedy=True)
    for wrong, fact in (
        (np.zeros((84, 84, 4), np.uint8), r"\[84, 84, 4\]"),
        (np.zeros((2, 4, 84, 84)), "float64"),
        ({"screen": np.zeros((4, 84, 84), np.uint8)}, "screen"),
    ):
        with pytest.raises(UserError, match=rf"{fact}.*expected image uint8\[N, 4, 84, 84\]"):
            policy.act(wrong)
    image = np.zeros((2, 4, 84, 84), np.uint8)
    with pytest.raises(UserError, match=r"done must contain 2 .*shape \[3\]"):
        policy.act(image, done=[True, False, True])
    policy.reset()
    policy.act(image)
    assert "reward" not in capsys.readouterr().err
    policy.act(image)
    policy.act(image)
    assert capsys.readouterr().err.count("reward=") == 1
    with pytest.raises(UserError, match="tasks are atari/Pong"):
        bestiary.load("zoo/pong").policy(env="atari/Breakout")


# --- tables and figures ---


def test_tables_of_a_run(catch_runs: list[bestiary.Run]) -> None:
    run = catch_runs[0]
    table = run.metrics
    assert table.num_rows == len(table["step"]) > 3
    assert "step" in repr(table)
    page = table._repr_html_()
    assert f"{table['step'][0]:g}" in page
    assert f"{table['step'][-1]:g}" in page
    figure = table.plot("loss", "entropy")
    (axes,) = figure.axes
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), table["entropy"])
    np.testing.assert_array_equal(axes.lines[1].get_xdata(), table["step"])
    with pytest.raises(UserError, match="los; did you mean loss"):
        table.plot("los")
    with pytest.raises(UserError, match="task of episodes contains text"):
        run.episodes.plot("task")
    figure.savefig("figure.png")
    assert run.validations.num_rows == 0
    run.plot().savefig("run.png")
    assert Path("run.png").stat().st_size > 5_000


def test_tables_become_pandas_data_frames(catch_runs: list[bestiary.Run]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = catch_runs[0].episodes.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(catch_runs[0].episodes)
    assert frame["task"].iloc[0] == "toy/catch"


def test_without_pandas_the_message_says_how_to_install_it(
    catch_runs: list[bestiary.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install 'bestiary\[pandas\]'"):
        catch_runs[0].metrics.to_pandas()


def test_representations_of_a_run_and_an_evaluation(catch_runs: list[bestiary.Run], tmp_path: Path) -> None:
    run = catch_runs[0]
    assert all(fact in repr(run) for fact in ("toy/catch", "seed 1", "finished"))
    assert "<td>toy/catch</td>" in run._repr_html_()
    assert re.search(r"<td>steps</td><td>[\d.k]+ of [\d.k]+</td>", run._repr_html_())
    assert "zoo/pong" in repr(bestiary.load("zoo/pong"))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.toml").write_text("env = '<b>'\nsteps = [")
    assert "unreadable" in repr(bestiary.Run(tmp_path / "damaged"))
    assert "unreadable" in bestiary.Run(tmp_path / "damaged")._repr_html_()
    evaluation: Evaluation = bestiary.evaluate(run, episodes=10)
    assert f"{evaluation.mean:.2f}" in evaluation._repr_html_()
    (axes,) = evaluation.plot().axes
    assert np.asarray(axes.lines[0].get_ydata())[-1] == 1


def test_everything_public_exists_and_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()
    for name in bestiary.__all__:
        assert getattr(bestiary, name).__doc__ or name == "__version__"
        assert f"`{name}" in page or f"bestiary.{name}" in page, name
    for kind in (bestiary.Run, bestiary.Policy, bestiary.Table, bestiary.Evaluation):
        for name, member in vars(kind).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                assert member.__doc__, f"{kind.__name__}.{name}"


# --- Stable-Baselines3 ---


@pytest.mark.slow
def test_ppo_of_stable_baselines3_learns_in_the_warehouse() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy

    env = bestiary.to_sb3(bestiary.make_vec("warehouse", num_envs=16, seed=1))
    model = sb3.PPO("MlpPolicy", env, n_steps=64, batch_size=256, seed=1, device="cpu", learning_rate=1e-3)
    before, _ = evaluate_policy(model, env, n_eval_episodes=32, deterministic=False)
    model.learn(100_000)
    after, _ = evaluate_policy(model, env, n_eval_episodes=32, deterministic=False)
    assert after > before + 5
    env.close()
