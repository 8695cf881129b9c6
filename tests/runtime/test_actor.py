"""The actor's bookkeeping: what is stored where, recomputed by hand from a pool whose every number is known."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bestiary.agents.agent import Agent, BasicAgent, Output
from bestiary.agents.memories import LSTM
from bestiary.agents.torsos import MLP
from bestiary.envs import Pool, make
from bestiary.envs.pool import first_step
from bestiary.errors import RunError
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Inputs, Rollout, Step
from bestiary.runtime.actor import Actor

LIFE = 5  # steps of an episode of the counting pool
T = 4


class CountingPool:
    """Row i shows [i, total steps, age] and earns 100 * total + 10 * i + action; every LIFE steps an episode ends.

    Rows start at different ages, so that they do not end together. Even rows end by themselves, odd ones are cut off.
    """

    frames_per_step = 1
    saveable = False
    tasks: tuple[str, ...] = ("counting",)
    observation_spec = {"vector": ArraySpec((3,), "float32")}
    action_spec = ActionSpec(("a", "b", "c"))
    measures_spec = {"total": ArraySpec((), "float32")}

    def __init__(self, num_envs: int = 4):
        self.num_envs = num_envs
        self.total, self.age = 0, np.arange(num_envs) % LIFE
        self.sent: list[np.ndarray] = []

    def _show(self) -> Arrays:
        columns = [np.arange(self.num_envs), np.full(self.num_envs, self.total), self.age]
        return {"vector": np.stack(columns, axis=1).astype(np.float32)}

    def _measures(self) -> Arrays:
        return {"total": np.full(self.num_envs, self.total, np.float32)}

    def reset(self) -> Step:
        return first_step(self._show(), self._measures())

    def send(self, actions: np.ndarray) -> None:
        self.sent.append(actions.copy())

    def recv(self) -> Step:
        self.total, self.age = self.total + 1, self.age + 1
        rows = np.arange(self.num_envs)
        reward = (100 * self.total + 10 * rows + self.sent[-1]).astype(np.float32)
        done = self.age == LIFE
        truncated = done & (rows % 2 == 1)
        final = {"vector": self._show()["vector"][truncated]} if truncated.any() else {}
        self.age = np.where(done, 0, self.age)
        task = np.zeros(self.num_envs, np.int64)
        return Step(self._show(), reward, done, truncated, done.copy(), task, self._measures(), final)

    def render(self) -> list[np.ndarray]:
        raise NotImplementedError

    def save(self) -> Arrays:
        return {}

    def load(self, state: Arrays) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def make_agent(pool: Pool, seed: int = 0) -> BasicAgent:
    """An LSTM that sees last reward and last action, so that every input matters."""
    torch.manual_seed(seed)
    return BasicAgent(
        pool.observation_spec,
        pool.action_spec,
        BasicAgent.Options(inputs="reward+action"),
        torso=partial(MLP, options=MLP.Options(width=8, depth=1)),
        memory=partial(LSTM, options=LSTM.Options(hidden=6)),
    )


def start(pool: Pool, agent: BasicAgent | None = None, unroll_length: int = T, seed: int = 3) -> Actor:
    actor = Actor(agent or make_agent(pool), pool, unroll_length, seed)
    actor.start()
    return actor


def entry(rollout: Rollout, t: int) -> Inputs:
    """What the agent sees at entry t alone, [1,N]."""
    whole = rollout.inputs()
    observation = {kind: array[t : t + 1] for kind, array in whole.observation.items()}
    rest = [getattr(whole, name)[t : t + 1] for name in ("reward", "done", "last_action", "task")]
    return Inputs(observation, *rest)


@torch.no_grad()
def replay(agent: Agent, rollout: Rollout) -> list[tuple[Output, tuple[Tensor, ...]]]:
    """The agent's output at every decision and its state after it, one step at a time from the stored state."""
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


def test_entries_are_what_the_pool_gave_and_follow_each_other() -> None:
    """Entry t of rollout k is the pool's step k*T + t; reward and done at t+1 follow the decision at t."""
    pool = CountingPool()
    actor = start(pool)
    rows = np.arange(4)
    for k in range(6):
        rollout = actor.collect()
        assert (rollout.length, rollout.num_envs) == (T, 4)
        for t in range(T + 1):
            total = k * T + t
            age = (rows + total) % LIFE
            seen = np.stack([rows, np.full(4, total), age], axis=1)
            np.testing.assert_array_equal(rollout.observation["vector"][t], seen)
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


def test_the_last_entry_is_the_first_of_the_next_rollout() -> None:
    actor = start(CountingPool())
    before = actor.collect()
    for _ in range(5):
        after = actor.collect()
        for name in ("reward", "done", "truncated", "task", "last_action"):
            assert torch.equal(getattr(before, name)[-1], getattr(after, name)[0]), name
        assert torch.equal(before.observation["vector"][-1], after.observation["vector"][0])
        assert torch.equal(before.measures["total"][-1], after.measures["total"][0])
        before = after


def test_log_prob_and_value_belong_to_the_decision_at_t() -> None:
    actor = start(CountingPool())
    for _ in range(4):
        rollout = actor.collect()
        for t, (output, _) in enumerate(replay(actor.agent, rollout)):
            assert torch.equal(rollout.value[t], output.value[0])
            assert torch.equal(rollout.log_prob[t], output.distribution.log_prob(rollout.action[t : t + 1])[0])


def test_the_learner_sees_what_the_actor_saw() -> None:
    """One call over the whole rollout gives the same log-probabilities and values as the actor's T calls."""
    actor = start(CountingPool())
    for _ in range(4):
        rollout = actor.collect()
        with torch.no_grad():
            output, _ = actor.agent(rollout.inputs(), rollout.state)
        torch.testing.assert_close(output.value[:-1], rollout.value, rtol=1e-5, atol=1e-6)
        log_prob = output.distribution[:-1].log_prob(rollout.action)
        torch.testing.assert_close(log_prob, rollout.log_prob, rtol=1e-5, atol=1e-6)


def test_the_stored_state_is_the_memory_before_entry_0() -> None:
    actor = start(CountingPool())
    rollout = actor.collect()
    assert all((part == 0).all() for part in rollout.state)
    for _ in range(4):
        *_, (_, state) = replay(actor.agent, rollout)
        rollout = actor.collect()
        assert all(torch.equal(a, b) for a, b in zip(rollout.state, state, strict=True))
        assert any((part != 0).any() for part in rollout.state)


def test_a_later_rollout_leaves_an_earlier_one_alone() -> None:
    actor = start(CountingPool())
    first = actor.collect()
    copies = [first.observation["vector"].clone(), first.reward.clone(), first.value.clone(), first.state[0].clone()]
    for _ in range(3):
        actor.collect()
    kept = [first.observation["vector"], first.reward, first.value, first.state[0]]
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_bootstrap_is_the_value_of_what_a_truncated_episode_ended_on() -> None:
    """As if the episode went on: the memory after decision t, the reward and action of decision t, done not set."""
    actor = start(CountingPool())
    checked = 0
    for k in range(8):
        rollout = actor.collect()
        for t, (_, state) in enumerate(replay(actor.agent, rollout)):
            cut = rollout.truncated[t + 1]
            assert (rollout.bootstrap[t][~cut] == 0).all()
            for row in torch.nonzero(cut).flatten().tolist():
                final = torch.tensor([[[row, k * T + t + 1, LIFE]]], dtype=torch.float32)
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


def test_the_version_that_decided_is_recorded() -> None:
    actor = start(CountingPool())
    actor.version = 7
    actor.act()
    actor.receive()
    actor.version = 8
    assert actor.collect().version.tolist() == [[7] * 4, [8] * 4, [8] * 4, [8] * 4]


def test_episodes_travel_with_the_rollout_they_ended_in() -> None:
    actor = start(CountingPool())
    for k in range(6):
        rollout = actor.collect()
        ended = [
            (4 * t, row) for t in range(1, T + 1) for row in range(4) if rollout.done[t, row]
        ]  # steps of the rollout, all environments together
        assert [(episode.step, episode.env) for episode in rollout.episodes] == ended
        for episode in rollout.episodes:
            total = k * T + episode.step // 4
            first = total == LIFE - episode.env  # rows start at different ages
            assert episode.length == (LIFE - episode.env if first else LIFE)
            assert episode.measures["total"] == sum(range(total - episode.length + 1, total + 1))
    assert actor.steps == 6 * T * 4


class BrokenPool(CountingPool):
    """Row 2 goes wrong after six steps, in a way to be chosen."""

    def __init__(self, what: str, value: float):
        super().__init__()
        self.what, self.value = what, value

    def recv(self) -> Step:
        step = super().recv()
        if self.total == 6:
            broken: dict[str, Any] = {"reward": step.reward, "observation": step.observation["vector"]}
            broken[self.what][2] = self.value
        return step


@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stops_the_run_and_names_the_environment(what: str, value: float) -> None:
    actor = start(BrokenPool(what, value))
    actor.collect()
    with pytest.raises(RunError, match=rf"environment 2 \(counting\) gave a {what}.* not finite.* step 24"):
        actor.collect()


class BrokenFinal(CountingPool):
    """What a truncated episode ends on is not a number."""

    def recv(self) -> Step:
        step = super().recv()
        for array in step.final.values():
            array[:] = np.nan
        return step


def test_a_final_observation_that_is_not_finite_stops_the_run() -> None:
    """Else its value enters the targets of learning. Row 3 is the first that is cut off, in the second step."""
    actor = start(BrokenFinal())
    with pytest.raises(RunError, match="environment 3 "):
        actor.collect()


def test_two_actors_in_turn_are_each_as_alone() -> None:
    def two() -> list[Actor]:
        return [start(make("toy/recall", num_envs=3, seed=seed, delay=3), seed=seed) for seed in (1, 2)]

    alone = [[actor.collect() for _ in range(5)] for actor in two()]
    first, second = two()
    together: list[list[Rollout]] = [[], []]
    first.act()
    for _ in range(5 * T):  # one pool steps while the agent thinks about the other
        second.act()
        if (rollout := first.receive()) is not None:
            together[0].append(rollout)
        first.act()
        if (rollout := second.receive()) is not None:
            together[1].append(rollout)
    for ours, theirs in zip(together, alone, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    assert not torch.equal(alone[0][0].observation["vector"], alone[1][0].observation["vector"])


def recall_actor(seed: int = 3) -> Actor:
    """Seven steps an episode and four a rollout: a save falls into the middle of episodes."""
    pool = make("toy/recall", num_envs=3, seed=9, delay=6)
    return Actor(make_agent(pool), pool, T, seed)


def test_a_loaded_actor_continues_bit_for_bit() -> None:
    original = recall_actor()
    original.start()
    for _ in range(3):
        original.collect()
    saved, steps = original.save(), original.steps
    copy = recall_actor(seed=77)  # its own seed must not matter
    copy.load({name: array.copy() for name, array in saved.items()}, steps)
    episodes = 0
    for _ in range(10):
        ours, theirs = original.collect(), copy.collect()
        assert_equal(ours, theirs)
        episodes += len(ours.episodes)
    assert copy.steps == original.steps
    assert episodes >= 12


def test_playing_on_leaves_a_saved_actor_alone() -> None:
    actor = recall_actor()
    actor.start()
    actor.collect()
    saved = actor.save()
    before = {name: array.copy() for name, array in saved.items()}
    for _ in range(5):
        actor.collect()
    for name, array in saved.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_one_saved_state_can_be_loaded_twice() -> None:
    original = recall_actor()
    original.start()
    original.collect()
    saved = original.save()
    runs = []
    for _ in range(2):
        copy = recall_actor()
        copy.load(saved, original.steps)
        runs.append([copy.collect() for _ in range(4)])
    for first, second in zip(*runs, strict=True):
        assert_equal(first, second)


def test_an_actor_is_saved_between_rollouts_only() -> None:
    actor = recall_actor()
    actor.start()
    actor.act()
    actor.receive()
    with pytest.raises(AssertionError, match="between rollouts"):
        actor.save()


def test_a_pool_that_cannot_be_saved_starts_anew() -> None:
    """New episodes and an empty memory, but the count of steps and the stream of decisions go on."""
    original = start(CountingPool())
    for _ in range(3):
        original.collect()
    copy = Actor(make_agent(original.pool), CountingPool(), T, seed=77)
    copy.load(original.save(), original.steps)
    assert copy.steps == 3 * T * 4
    assert torch.equal(copy.generator.get_state(), original.generator.get_state())
    rollout = copy.collect()
    assert rollout.done[0].all()
    assert all((part == 0).all() for part in rollout.state)
    assert rollout.observation["vector"][0, :, 1].tolist() == [0] * 4
