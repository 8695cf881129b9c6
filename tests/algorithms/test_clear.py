"""CLEAR: replay buffer, loss against a slow implementation, exact resume, and less forgetting than IMPALA."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import bestiary
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.replay_buffer import ReservoirBuffer
from bestiary.config.resolve import resolve
from bestiary.rollout import Rollout
from bestiary.runs.run import Run
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts
from bestiary.utils.errors import UserError

OPTIONS: dict[str, Any] = {
    "env": "toy/catch",
    "algo": "clear",
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 4,
    "rollout_length": 5,
    "memory": "gru",
    "memory.hidden": 8,
    "torso": "mlp",
    "steps": 4_000,
}


def collect(**options: Any) -> tuple[Any, list[Rollout]]:
    (actor,), learner = make_actors_and_learner(resolve({**OPTIONS, **options}))
    actor.start()
    rollouts = collect_rollouts(actor, learner)
    actor.pool.close()
    return learner, rollouts


def all_batches(learner: Any, rollouts: list[Rollout]) -> list[Any]:
    return list(learner.algorithm.batches(rollouts, learner.context()))


def test_reservoir_is_a_uniform_sample_of_all_trajectories() -> None:
    _, (rollout,) = collect()
    generator = torch.Generator().manual_seed(1)
    counts: Counter[int] = Counter()
    for _ in range(600):
        buffer = ReservoirBuffer(capacity=4)
        for start in range(0, 24, 8):
            rollout.value[:] = torch.arange(start, start + 8.0)
            buffer.add(rollout, generator)
        assert len(buffer) == 4
        counts.update(int(trajectory.value[0, 0]) for trajectory in buffer.trajectories)
    assert set(counts) == set(range(24))
    # Each trajectory is stored in 100 of 600 buffers on average, with standard deviation 9.1.
    assert all(60 < count < 140 for count in counts.values())


def test_half_of_each_batch_is_replayed_and_new_trajectories_enter_the_buffer_afterwards() -> None:
    learner, rollouts = collect()
    first, second = all_batches(learner, rollouts)
    assert first.rollout.num_envs == first.num_new == 4  # the buffer was empty
    assert second.rollout.num_envs == 8
    assert second.num_new == 4
    replayed = second.rollout.extras["replayed"]
    assert replayed[:, :4].eq(0).all()
    assert replayed[:, 4:].eq(1).all()
    stored = {tuple(column.tolist()) for column in first.rollout.log_prob.T}
    assert all(tuple(column.tolist()) in stored for column in second.rollout.log_prob[:, 4:].T)
    assert len(learner.algorithm.buffer) == 8


@pytest.mark.parametrize("critic", ["shared", "popart"])
def test_loss_equals_a_slow_implementation(critic: str) -> None:
    options = {"policy_cloning_coef": 0.3, "value_cloning_coef": 0.7}
    learner, rollouts = collect(critic=critic, **{f"algo.{name}": value for name, value in options.items()})
    _, batch = all_batches(learner, rollouts)
    with torch.no_grad():
        for parameter in learner.agent.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if critic == "popart":
            learner.popart.mu.fill_(0.4)
            learner.popart.sigma.fill_(2.0)
    rollout = batch.rollout
    loss = learner.algorithm.loss(learner.agent, rollout)
    fields = Impala.Options.__dataclass_fields__
    impala = Impala(Impala.Options(**{name: getattr(learner.algorithm.options, name) for name in fields}))
    expected = float(impala.loss(learner.agent, rollout).total.detach())
    with torch.no_grad():
        output, _ = learner.agent(rollout.inputs(), rollout.state)
    mu, sigma = (0.4, 2.0) if critic == "popart" else (0.0, 1.0)
    for t in range(rollout.length):
        for b in range(4, 8):
            old = torch.softmax(rollout.extras["stored_logits"][t, b], -1)
            new = torch.softmax(output.distribution.logits[t, b], -1)
            kl = sum(float(p * (p / q).log()) for p, q in zip(old, new, strict=True))
            change = (float(output.value[t, b]) - mu) / sigma - (float(rollout.value[t, b]) - mu) / sigma
            expected += 0.3 * kl + 0.7 * change**2
    assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-4)


def test_cloning_has_no_effect_while_policy_and_values_are_unchanged() -> None:
    learner, rollouts = collect()
    _, batch = all_batches(learner, rollouts)
    sums = learner.algorithm.loss(learner.agent, batch.rollout).sums
    assert float(sums["policy_cloning"]) == pytest.approx(0, abs=1e-6)
    assert float(sums["value_cloning"]) == pytest.approx(0, abs=1e-6)
    assert float(sums["replayed"]) == 20


def test_policy_lag_is_that_of_the_new_trajectories() -> None:
    learner, rollouts = collect()
    for rollout in rollouts:
        rollout.version[:] = 0
    metrics = learner.learn(rollouts)
    for rollout in rollouts:
        rollout.version[:] = learner.version
    metrics = learner.learn(rollouts)
    assert [m["max_policy_lag"] for m in metrics] == [0, 1]


def test_resumed_run_equals_an_uninterrupted_run() -> None:
    options = {**OPTIONS, "algo.buffer_size": 20, "algo.lr_schedule": "constant"}
    uninterrupted = bestiary.train(**options, run_dir="uninterrupted")
    resumed = bestiary.resume(bestiary.train(**{**options, "steps": 2_000, "run_dir": "resumed"}), steps=4_000)
    tensors = [run.checkpoints[-1].load_learner() for run in (uninterrupted, resumed)]
    for name in ("model", "optimizer", "algorithm"):
        assert tensors[0][name].keys() == tensors[1][name].keys()
        for key, tensor in tensors[0][name].items():
            assert torch.equal(tensor, tensors[1][name][key]), key
    assert tensors[0]["algorithm"]["state.num_seen"] == 800  # 4,000 steps in trajectories of 5 steps


def test_buffer_that_is_not_saved_is_filled_again(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train(**{**OPTIONS, "steps": 2_000, "algo.save_buffer": False, "run_dir": "r"})
    assert "replay buffer" not in capsys.readouterr().err
    run = bestiary.resume(run, steps=2_400)
    assert "the checkpoint has no replay buffer" in capsys.readouterr().err
    assert run.steps >= 2_400
    assert sum(path.stat().st_size for path in Path("r/checkpoints").glob("*/algorithm.safetensors")) < 2_000


def test_several_learners_are_refused() -> None:
    with pytest.raises(UserError, match=r"--learners 2: this algorithm supports only one learner"):
        resolve({**OPTIONS, "runtime": "cluster", "cluster": "local", "learners": 2})


# Two tasks with the same observations and actions. The right action depends on the sign and on the task.
SIGNS = """
import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box, Discrete

class First(Env):
    answers, task = (0, 1, 2, 3), 0
    observation_space = Box(0, 1, (6,), np.float32)
    action_space = Discrete(4)

    def observe(self):
        self.sign = int(self.np_random.integers(4))
        observation = np.zeros(6, np.float32)
        observation[[self.sign, 4 + self.task]] = 1
        return observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        reward = float(action == self.answers[self.sign])
        self.steps += 1
        return self.observe(), reward, self.steps == 8, False, {}

class Second(First):
    answers, task = (3, 2, 1, 0), 1
"""
SEQUENCE: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 16,
    "batch_size": 16,
    "micro_batch_size": 16,
    "rollout_length": 8,
    "lr": 2e-3,
    "steps": 20_000,
    "algo.lr_schedule": "constant",
    "algo.entropy_coef": 0.003,
    "agent.extra_inputs": "none",
}


def test_the_first_of_two_tasks_is_forgotten_by_impala_but_not_by_clear() -> None:
    """The optimal return is 8 in both tasks, a random policy gets 2. The second run starts with the first one's buffer.

    With other seeds, IMPALA kept 2.0 to 2.2 of the first task, CLEAR 6.0 to 7.8; both learned the second one to 6.
    """
    Path("signs.py").write_text(SIGNS)
    first = bestiary.train("signs.py:First", algo="clear", run_dir="first", seed=2, **SEQUENCE)
    assert bestiary.evaluate(first, episodes=50).mean > 7
    kept = {}
    for algo in ("impala", "clear"):
        second = bestiary.train("signs.py:Second", algo=algo, init_from="first", run_dir=algo, seed=2, **SEQUENCE)
        assert bestiary.evaluate(second, episodes=50).mean > 4.5
        kept[algo] = bestiary.evaluate(second, episodes=50, env=["signs.py:First"]).mean
    assert kept["impala"] < 4
    assert kept["clear"] > 5.5


def test_a_warm_start_takes_over_the_replay_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    Path("signs.py").write_text(SIGNS)
    options = {**SEQUENCE, "steps": 512, "algo": "clear", "algo.buffer_size": 30}
    bestiary.train("signs.py:First", run_dir="first", **options)
    bestiary.train("signs.py:Second", run_dir="second", init_from="first", **options)
    assert "replay buffer with 30 trajectories" in capsys.readouterr().err
    first, second = (Run(Path(name)).checkpoints[-1].load_learner()["algorithm"] for name in ("first", "second"))
    assert int(second["state.num_seen"]) == 2 * int(first["state.num_seen"])
    shows_first_task = second["state.observation.vector"][0, :, 4] == 1
    assert 0 < int(shows_first_task.sum()) < 30  # trajectories of both tasks
    bestiary.train("signs.py:Second", run_dir="none", init_from="first", **{**options, "algo.inherit_buffer": False})
    assert "replay buffer with" not in capsys.readouterr().err


def test_a_replay_buffer_that_does_not_fit_is_refused() -> None:
    small: dict[str, Any] = {"runtime": "serial", "steps": 160, "num_envs": 8, "batch_size": 8, "algo": "clear"}
    bestiary.train("toy/catch", run_dir="first", **small)
    with pytest.raises(UserError, match="other observations or actions"):
        bestiary.train("toy/catch", size=12, run_dir="second", init_from="first", **small)
    assert not Path("second").exists()
