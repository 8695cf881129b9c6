"""Contents of an actor's rollouts, compared with a vector environment all of whose values are known."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bestiary.agents.agent import Agent, BasicAgent, Output
from bestiary.agents.memories import LSTM
from bestiary.agents.torsos import MLP
from bestiary.envs import VectorEnv, make_env
from bestiary.envs.vector_env import initial_step
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Inputs, Rollout, Step
from bestiary.training.actor import Actor
from bestiary.utils.errors import RunError

EPISODE_LENGTH = 5  # steps per episode of CountingVectorEnv
T = 4


class CountingVectorEnv(VectorEnv):
    """Row i observes [i, total steps, age]; its reward is 100 * total + 10 * i + action.

    An episode ends after EPISODE_LENGTH steps: even rows terminate, odd rows are truncated. Rows start at different
    ages, so that their episodes do not end together.
    """

    tasks: tuple[str, ...] = ("counting",)
    observation_spec = {"vector": ArraySpec((3,), "float32")}
    action_spec = ActionSpec(("a", "b", "c"))
    measures_spec = {"total": ArraySpec((), "float32")}

    def __init__(self, num_envs: int = 4):
        self.num_envs = num_envs
        self.total = 0
        self.age = np.arange(num_envs) % EPISODE_LENGTH
        self.sent: list[np.ndarray] = []

    def _observe(self) -> Arrays:
        columns = [np.arange(self.num_envs), np.full(self.num_envs, self.total), self.age]
        return {"vector": np.stack(columns, axis=1).astype(np.float32)}

    def _measures(self) -> Arrays:
        return {"total": np.full(self.num_envs, self.total, np.float32)}

    def reset(self) -> Step:
        return initial_step(self._observe(), self._measures())

    def send(self, actions: np.ndarray) -> None:
        self.sent.append(actions.copy())

    def recv(self) -> Step:
        self.total += 1
        self.age = self.age + 1
        rows = np.arange(self.num_envs)
        reward = (100 * self.total + 10 * rows + self.sent[-1]).astype(np.float32)
        done = self.age == EPISODE_LENGTH
        truncated = done & (rows % 2 == 1)
        final = {"vector": self._observe()["vector"][truncated]} if truncated.any() else {}
        self.age = np.where(done, 0, self.age)
        task = np.zeros(self.num_envs, np.int64)
        return Step(self._observe(), reward, done, truncated, done.copy(), task, self._measures(), final)


def make_agent(pool: VectorEnv, seed: int = 0) -> BasicAgent:
    """Return an LSTM agent that observes the last reward and last action, so that its output depends on all inputs."""
    torch.manual_seed(seed)
    return BasicAgent(
        pool.observation_spec,
        pool.action_spec,
        BasicAgent.Options(extra_inputs="reward+action"),
        torso=partial(MLP, options=MLP.Options(width=8, depth=1)),
        memory=partial(LSTM, options=LSTM.Options(hidden=6)),
    )


def start_actor(pool: VectorEnv, agent: BasicAgent | None = None, rollout_length: int = T, seed: int = 3) -> Actor:
    actor = Actor(agent or make_agent(pool), pool, rollout_length, seed)
    actor.start()
    return actor


def entry(rollout: Rollout, t: int) -> Inputs:
    """Return the agent's inputs at entry t, [1,N]."""
    inputs = rollout.inputs()
    observation = {kind: array[t : t + 1] for kind, array in inputs.observation.items()}
    rest = [getattr(inputs, name)[t : t + 1] for name in ("reward", "done", "last_action", "task")]
    return Inputs(observation, *rest)


@torch.no_grad()
def infer_steps(agent: Agent, rollout: Rollout) -> list[tuple[Output, tuple[Tensor, ...]]]:
    """Return the agent's output at each step and the state after it, computed step by step from the stored state."""
    results, state = [], rollout.state
    for t in range(rollout.length):
        output, state = agent(entry(rollout, t), state)
        results.append((output, state))
    return results


def assert_equal(ours: Rollout, theirs: Rollout) -> None:
    for name, value in vars(ours).items():
        other = getattr(theirs, name)
        if isinstance(value, Tensor):
            assert torch.equal(value, other), name
        elif isinstance(value, dict):
            assert value.keys() == other.keys()
            assert all(torch.equal(value[key], other[key]) for key in value), name
        elif isinstance(value, tuple):
            assert all(torch.equal(a, b) for a, b in zip(value, other, strict=True)), name
        else:
            assert value == other, name


def test_environment_may_change_the_array_of_actions() -> None:
    class Overwriting(CountingVectorEnv):
        def send(self, actions: np.ndarray) -> None:
            super().send(actions)
            actions[:] = -1

    pool = Overwriting()
    rollout = start_actor(pool).collect()
    np.testing.assert_array_equal(rollout.action, np.stack(pool.sent))
    np.testing.assert_array_equal(rollout.last_action[1:], np.stack(pool.sent))


def test_entries_are_the_steps_of_the_environment_in_order() -> None:
    """Entry t of rollout k is the environment's step k*T + t; reward and done at t+1 follow the action at t."""
    pool = CountingVectorEnv()
    actor = start_actor(pool)
    rows = np.arange(4)
    for k in range(6):
        rollout = actor.collect()
        assert (rollout.length, rollout.num_envs) == (T, 4)
        for t in range(T + 1):
            total = k * T + t
            age = (rows + total) % EPISODE_LENGTH
            expected = np.stack([rows, np.full(4, total), age], axis=1)
            np.testing.assert_array_equal(rollout.observation["vector"][t], expected)
            np.testing.assert_array_equal(rollout.measures["total"][t], np.full(4, total))
            ended = (age == 0) if total else np.ones(4, bool)
            np.testing.assert_array_equal(rollout.done[t], ended)
            np.testing.assert_array_equal(rollout.truncated[t], ended & (rows % 2 == 1) & (total > 0))
        for t in range(T):
            action = pool.sent[k * T + t]
            np.testing.assert_array_equal(rollout.action[t], action)
            np.testing.assert_array_equal(rollout.reward[t + 1], 100 * (k * T + t + 1) + 10 * rows + action)
    assert len(pool.sent) == 6 * T
    assert {0, 1, 2} == set(np.concatenate(pool.sent).tolist())


def test_last_entry_is_the_first_of_the_next_rollout() -> None:
    actor = start_actor(CountingVectorEnv())
    before = actor.collect()
    for _ in range(5):
        after = actor.collect()
        for name in ("reward", "done", "truncated", "task", "last_action"):
            assert torch.equal(getattr(before, name)[-1], getattr(after, name)[0]), name
        assert torch.equal(before.observation["vector"][-1], after.observation["vector"][0])
        assert torch.equal(before.measures["total"][-1], after.measures["total"][0])
        before = after


def test_log_prob_and_value_belong_to_the_action_at_t() -> None:
    actor = start_actor(CountingVectorEnv())
    for _ in range(4):
        rollout = actor.collect()
        for t, (output, _) in enumerate(infer_steps(actor.agent, rollout)):
            assert torch.equal(rollout.value[t], output.value[0])
            assert torch.equal(rollout.log_prob[t], output.distribution.log_prob(rollout.action[t : t + 1])[0])


def test_learner_computes_the_same_outputs_as_the_actor() -> None:
    """One call on the whole rollout gives the log-probabilities and values of the actor's T calls."""
    actor = start_actor(CountingVectorEnv())
    for _ in range(4):
        rollout = actor.collect()
        with torch.no_grad():
            output, _ = actor.agent(rollout.inputs(), rollout.state)
        torch.testing.assert_close(output.value[:-1], rollout.value, rtol=1e-5, atol=1e-6)
        log_prob = output.distribution[:-1].log_prob(rollout.action)
        torch.testing.assert_close(log_prob, rollout.log_prob, rtol=1e-5, atol=1e-6)


def test_stored_state_is_the_recurrent_state_before_entry_0() -> None:
    actor = start_actor(CountingVectorEnv())
    rollout = actor.collect()
    assert all((part == 0).all() for part in rollout.state)
    for _ in range(4):
        *_, (_, state) = infer_steps(actor.agent, rollout)
        rollout = actor.collect()
        assert all(torch.equal(a, b) for a, b in zip(rollout.state, state, strict=True))
        assert any((part != 0).any() for part in rollout.state)


def test_later_rollouts_do_not_change_earlier_ones() -> None:
    actor = start_actor(CountingVectorEnv())
    first = actor.collect()
    copies = [first.observation["vector"].clone(), first.reward.clone(), first.value.clone(), first.state[0].clone()]
    for _ in range(3):
        actor.collect()
    kept = [first.observation["vector"], first.reward, first.value, first.state[0]]
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_bootstrap_is_the_value_of_the_final_observation_of_truncated_episodes() -> None:
    """Its inputs are those of a continued episode: state after step t, reward and action of step t, done not set."""
    actor = start_actor(CountingVectorEnv())
    checked = 0
    for k in range(8):
        rollout = actor.collect()
        for t, (_, state) in enumerate(infer_steps(actor.agent, rollout)):
            truncated = rollout.truncated[t + 1]
            assert (rollout.bootstrap[t][~truncated] == 0).all()
            for row in torch.nonzero(truncated).flatten().tolist():
                final = torch.tensor([[[row, k * T + t + 1, EPISODE_LENGTH]]], dtype=torch.float32)
                one = slice(row, row + 1)
                inputs = Inputs(
                    {"vector": final},
                    rollout.reward[t + 1 : t + 2, one],
                    torch.zeros(1, 1, dtype=torch.bool),
                    rollout.action[t : t + 1, one],
                    rollout.task[t + 1 : t + 2, one],
                )
                with torch.no_grad():
                    output, _ = actor.agent(inputs, tuple(part[one] for part in state))
                torch.testing.assert_close(rollout.bootstrap[t, row], output.value[0, 0], rtol=1e-5, atol=1e-6)
                assert output.value[0, 0] != 0
                checked += 1
    assert checked >= 10


def test_version_of_the_weights_is_stored_per_step() -> None:
    actor = start_actor(CountingVectorEnv())
    actor.version = 7
    actor.act()
    actor.receive()
    actor.version = 8
    assert actor.collect().version.tolist() == [[7] * 4, [8] * 4, [8] * 4, [8] * 4]


def test_episodes_are_stored_in_the_rollout_in_which_they_ended() -> None:
    actor = start_actor(CountingVectorEnv())
    for k in range(6):
        rollout = actor.collect()
        # Steps are counted over all environments, from the start of the rollout.
        ended = [(4 * t, row) for t in range(1, T + 1) for row in range(4) if rollout.done[t, row]]
        assert [(episode.step, episode.env) for episode in rollout.episodes] == ended
        for episode in rollout.episodes:
            total = k * T + episode.step // 4
            first = total == EPISODE_LENGTH - episode.env  # rows start at different ages
            assert episode.length == (EPISODE_LENGTH - episode.env if first else EPISODE_LENGTH)
            assert episode.measures["total"] == sum(range(total - episode.length + 1, total + 1))
    assert actor.steps == 6 * T * 4


class NonFiniteVectorEnv(CountingVectorEnv):
    """Row 2 returns a given reward or observation after six steps."""

    def __init__(self, what: str, value: float):
        super().__init__()
        self.what = what
        self.value = value

    def recv(self) -> Step:
        step = super().recv()
        if self.total == 6:
            arrays: dict[str, Any] = {"reward": step.reward, "observation": step.observation["vector"]}
            arrays[self.what][2] = self.value
        return step


@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_stop_the_run_and_name_the_environment(what: str, value: float) -> None:
    actor = start_actor(NonFiniteVectorEnv(what, value))
    actor.collect()
    with pytest.raises(RunError, match=rf"environment 2 \(counting\) returned an? {what}.* not finite.* step 24"):
        actor.collect()


class NonFiniteFinalVectorEnv(CountingVectorEnv):
    """The final observations of truncated episodes are NaN."""

    def recv(self) -> Step:
        step = super().recv()
        for array in step.final.values():
            array[:] = np.nan
        return step


def test_non_finite_final_observation_stops_the_run() -> None:
    """Its value would enter the value targets. Row 3 is the first to be truncated, in the second step."""
    actor = start_actor(NonFiniteFinalVectorEnv())
    with pytest.raises(RunError, match="environment 3 "):
        actor.collect()


class MissingFinalVectorEnv(CountingVectorEnv):
    """The final observations of truncated episodes are missing."""

    def recv(self) -> Step:
        return replace(super().recv(), final={})


def test_missing_final_observation_stops_the_run_with_one_line() -> None:
    actor = start_actor(MissingFinalVectorEnv())
    with pytest.raises(RunError, match=r"counting: recv: final is empty, but truncated is set in 1 rows.* step 8 "):
        actor.collect()


class MalformedVectorEnv(CountingVectorEnv):
    """From the sixth step on, one array of each step is replaced."""

    def __init__(self, name: str, array: np.ndarray):
        super().__init__()
        self.name = name
        self.array = array

    def recv(self) -> Step:
        step = super().recv()
        if self.total < 6:
            return step
        value: Any = {"vector": self.array} if self.name == "observation" else self.array
        return replace(step, **{self.name: value})


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("reward", np.ones(1, np.float32)),  # would be copied to all environments
        ("reward", np.ones(4, np.int64)),
        ("reward", np.ones(4)),
        ("task", np.full(4, -1)),
        ("task", np.zeros(4)),
        ("observation", np.zeros((1, 3), np.float32)),
        ("observation", np.zeros(3, np.float32)),
        ("observation", np.zeros((4, 3))),
        ("observation", np.zeros((4, 3), np.float32)[::-1]),
    ],
)
def test_malformed_step_stops_the_run_and_names_the_array(name: str, array: np.ndarray) -> None:
    actor = start_actor(MalformedVectorEnv(name, array))
    actor.collect()
    with pytest.raises(RunError, match=rf"counting: recv: .*{name}.* step 24 "):
        actor.collect()


def test_interleaved_actors_do_not_affect_each_other() -> None:
    def make_actors() -> list[Actor]:
        return [start_actor(make_env("toy/recall", num_envs=3, seed=seed, delay=3), seed=seed) for seed in (1, 2)]

    alone = [[actor.collect() for _ in range(5)] for actor in make_actors()]
    first, second = make_actors()
    interleaved: list[list[Rollout]] = [[], []]
    first.act()
    for _ in range(5 * T):  # one vector environment steps during the inference for the other
        second.act()
        if (rollout := first.receive()) is not None:
            interleaved[0].append(rollout)
        first.act()
        if (rollout := second.receive()) is not None:
            interleaved[1].append(rollout)
    for ours, theirs in zip(interleaved, alone, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    assert not torch.equal(alone[0][0].observation["vector"], alone[1][0].observation["vector"])


def make_recall_actor(seed: int = 3) -> Actor:
    """Return an actor with 7 steps per episode and 4 per rollout, so that it is saved in the middle of episodes."""
    pool = make_env("toy/recall", num_envs=3, seed=9, delay=6)
    return Actor(make_agent(pool), pool, T, seed)


def test_loaded_actor_continues_bit_for_bit() -> None:
    original = make_recall_actor()
    original.start()
    for _ in range(3):
        original.collect()
    saved, steps = original.save(), original.steps
    copy = make_recall_actor(seed=77)  # the loaded state replaces its seed
    copy.load({name: array.copy() for name, array in saved.items()}, steps)
    episodes = 0
    for _ in range(10):
        ours, theirs = original.collect(), copy.collect()
        assert_equal(ours, theirs)
        episodes += len(ours.episodes)
    assert copy.steps == original.steps
    assert episodes >= 12


def test_further_steps_do_not_change_the_saved_state() -> None:
    actor = make_recall_actor()
    actor.start()
    actor.collect()
    saved = actor.save()
    before = {name: array.copy() for name, array in saved.items()}
    for _ in range(5):
        actor.collect()
    for name, array in saved.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_saved_state_can_be_loaded_twice() -> None:
    original = make_recall_actor()
    original.start()
    original.collect()
    saved = original.save()
    runs = []
    for _ in range(2):
        copy = make_recall_actor()
        copy.load(saved, original.steps)
        runs.append([copy.collect() for _ in range(4)])
    for first, second in zip(*runs, strict=True):
        assert_equal(first, second)


def test_an_actor_is_saved_between_rollouts_only() -> None:
    actor = make_recall_actor()
    actor.start()
    actor.act()
    actor.receive()
    with pytest.raises(AssertionError, match="between rollouts"):
        actor.save()


def test_environments_that_cannot_be_saved_are_restarted() -> None:
    """Episodes and the recurrent state start again; the step count and the sampling generator are restored."""
    original = start_actor(CountingVectorEnv())
    for _ in range(3):
        original.collect()
    copy = Actor(make_agent(original.pool), CountingVectorEnv(), T, seed=77)
    copy.load(original.save(), original.steps)
    assert copy.steps == 3 * T * 4
    assert torch.equal(copy.generator.get_state(), original.generator.get_state())
    rollout = copy.collect()
    assert rollout.done[0].all()
    assert all((part == 0).all() for part in rollout.state)
    assert rollout.observation["vector"][0, :, 1].tolist() == [0] * 4
