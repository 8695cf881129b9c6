"""Tests of PPO: batches, advantages, loss, validation of options, reproducibility, learning."""

import contextlib
import math
from typing import Any

import pytest
import torch

import bestiary
from bestiary.agents import AGENTS
from bestiary.agents.memories import MEMORIES
from bestiary.algorithms.gae import gae
from bestiary.algorithms.learn_call_sizes import LearnSizes
from bestiary.algorithms.ppo import PPO
from bestiary.config.resolve import resolve
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts
from bestiary.utils.errors import UserError

SMALL: dict[str, Any] = {
    "env": "toy/recall",
    "algo": "ppo",
    "runtime": "serial",
    "num_envs": 6,
    "rollout_length": 12,
    "algo.sequence_length": 4,
    "algo.minibatches": 3,
    "algo.epochs": 2,
    "steps": 720,
}


def collect(**options: Any):
    """Build actor and learner, and collect the rollouts of one `learn` call."""
    (actor,), learner = make_actors_and_learner(resolve({**SMALL, **options}))
    actor.start()
    return actor, learner, collect_rollouts(actor, learner)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "agent", [name for name, agent in AGENTS.items() if "memory" in getattr(agent, "components", ())]
)
@pytest.mark.parametrize("env", ["toy/recall", "toy/catch"])
def test_ratio_is_one_before_the_first_update(env, agent, memory):
    """Actor and learner compute the same policy for sequences with carried-over states and resets."""
    actor, learner, rollouts = collect(env=env, agent=agent, memory=memory)
    rollouts = collect_rollouts(actor, learner)  # the second time: memories and episodes have started
    batch = learner.algorithm.prepare(rollouts, learner.context())
    with torch.no_grad():
        output, _ = learner.agent(batch.inputs()[: batch.length], batch.state)
        ratio = (output.distribution.log_prob(batch.action) - batch.log_prob).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
        torch.testing.assert_close(output.value, batch.value, atol=1e-5, rtol=1e-4)


def test_every_step_is_used_once_per_epoch():
    _actor, learner, rollouts = collect()
    for number, rollout in enumerate(rollouts):
        rollout.log_prob[:] = 0
        # a unique number for each step
        rollout.value[:] = torch.arange(rollout.value.numel()).view_as(rollout.value) + 1000 * number
    used: list[float] = []
    sizes = []

    batches = learner.algorithm.batches(rollouts, learner.context())
    batch = next(batches)
    with contextlib.suppress(StopIteration):
        while True:
            used.extend(batch.rollout.value.flatten().tolist())
            sizes.append(batch.rollout.num_envs)
            batch = batches.send({"kl": 0.0})
    everything = sorted(torch.cat([r.value.flatten() for r in rollouts]).tolist())
    half = len(used) // 2
    assert sorted(used[:half]) == sorted(used[half:]) == everything
    assert used[:half] != used[half:]  # in another order
    assert sizes == [6] * 6


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"), [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, -1.0, False), (0.5, 1.0, True)]
)
def test_clipping_removes_the_gradient_on_one_side_only(ratio, advantage, has_gradient):
    """Outside the range, a step has no gradient only if its ratio changed in the direction of its advantage."""
    _actor, learner, rollouts = collect()
    batch = learner.algorithm.prepare(rollouts, learner.context())
    batch.extras["advantage"] = torch.full_like(batch.extras["advantage"], advantage)
    with torch.no_grad():
        output, _ = learner.agent(batch.inputs()[: batch.length], batch.state)
        batch.log_prob[:] = output.distribution.log_prob(batch.action) - math.log(ratio)
    output, _ = learner.agent(batch.inputs()[: batch.length], batch.state)
    terms = learner.algorithm.policy_terms(output, batch, 0.0)
    (gradient,) = torch.autograd.grad(terms["policy_loss"], learner.agent.policy.bias)
    assert bool(gradient.abs().sum() > 0) == has_gradient
    assert terms["clipped"] == batch.num_steps


@pytest.mark.parametrize("horizon", [None, 6, 3])
def test_advantages_are_computed_over_the_whole_rollout(horizon):
    """Splitting into sequences and two pools does not change the advantages, nor does a horizon that ends elsewhere."""
    options = PPO.Options(
        rollout_length=12,
        sequence_length=4,
        minibatches=1,
        normalise_advantages=False,
        lam=0.9,
        discount=0.8,
        horizon=horizon,
    )
    algorithm = PPO(options)
    actors, learner = make_actors_and_learner(
        resolve({**SMALL, "runtime": "local", "pools": 2, "num_envs": 4, "algo.minibatches": 1})
    )
    for actor in actors:
        actor.start()
    rollouts = [actor.collect() for _ in range(3) for actor in actors]
    batch = algorithm.prepare(rollouts, learner.context())
    assert batch.num_envs == 12
    for pool, actor in enumerate(actors):
        chain = rollouts[pool::2]
        with torch.no_grad():
            output, _ = learner.agent(chain[-1].inputs(), chain[-1].state)
        expected = gae(
            torch.cat([r.reward[1:].clamp(-1, 1) for r in chain]),
            0.8 * (~torch.cat([r.done[1:] for r in chain])).float(),
            torch.cat([r.value for r in chain]),
            output.value[-1],
            lam=0.9,
            horizon=horizon,
        )
        for k in range(3):
            start = (pool + 2 * k) * 2
            sequence = batch.env_slice(start, start + 2)
            torch.testing.assert_close(sequence.extras["advantage"], expected.advantages[4 * k : 4 * k + 4])
            torch.testing.assert_close(sequence.extras["target"], expected.targets[4 * k : 4 * k + 4])
            assert torch.equal(sequence.log_prob, chain[k].log_prob)
        actor.pool.close()


def test_advantages_are_normalised():
    _, learner, rollouts = collect()
    advantage = learner.algorithm.prepare(rollouts, learner.context()).extras["advantage"]
    assert advantage.mean().item() == pytest.approx(0, abs=1e-5)
    assert advantage.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_time_limits_are_bootstrapped():
    def targets(final_value: float) -> torch.Tensor:
        _, learner, rollouts = collect(env="toy/chain", time_limit=5, **{"algo.normalise_advantages": False})
        for rollout in rollouts:
            truncated = rollout.truncated[1:]
            rollout.bootstrap = torch.where(truncated, final_value, 0.0)
        batch = learner.algorithm.prepare(rollouts, learner.context())
        assert batch.truncated.any()
        return batch.extras["target"][batch.truncated[1:]]

    torch.testing.assert_close(targets(10.0) - targets(0.0), torch.full_like(targets(0.0), 9.9))


def test_one_epoch_and_one_minibatch_is_a2c():
    _, learner, rollouts = collect(**{"algo.epochs": 1, "algo.minibatches": 1, "algo.normalise_advantages": False})
    batch = learner.algorithm.prepare(rollouts, learner.context())
    loss = learner.algorithm.loss(learner.agent, batch, 0.0).total
    output, _ = learner.agent(batch.inputs()[: batch.length], batch.state)
    advantage, target = batch.extras["advantage"], batch.extras["target"]
    a2c = (
        -(output.distribution.log_prob(batch.action) * advantage)
        + 0.25 * (target - output.value).square()
        - 0.01 * output.distribution.entropy()
    ).sum()
    for gradient, expected in zip(
        torch.autograd.grad(loss, learner.parameters), torch.autograd.grad(a2c, learner.parameters), strict=True
    ):
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


def loss_of(ratio: float, advantage: float, progress: float = 0.0, value_shift: float = 0.0, **options: Any):
    """Return mean loss and metrics of a rollout in which all steps have this ratio and advantage; no entropy bonus."""
    algorithm = PPO(PPO.Options(entropy_coef=0.0, **options))
    _, learner, (rollout, *_) = collect()
    with torch.no_grad():
        output, _ = learner.agent(rollout.inputs()[: rollout.length], rollout.state)
    rollout.log_prob = output.distribution.log_prob(rollout.action) - math.log(ratio)
    rollout.value = output.value - value_shift
    batch = rollout.with_extras(target=output.value.clone(), advantage=torch.full_like(output.value, advantage))
    with torch.no_grad():
        loss = algorithm.loss(learner.agent, batch, progress)
    steps = rollout.log_prob.numel()
    return float(loss.total) / steps, {name: float(value) / steps for name, value in loss.sums.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.05, 2.0, -2.1), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (1.5, -2.0, 3.0)],
)
def test_ratio_clipping(ratio, advantage, expected):
    loss, metrics = loss_of(ratio, advantage, clip=0.2)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert metrics["clipped"] == (abs(ratio - 1) > 0.2)
    assert metrics["kl"] == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-3)


def test_linear_clip_schedule():
    assert loss_of(1.5, 2.0, 0.5, clip=0.2, clip_schedule="linear")[0] == pytest.approx(-2.2, rel=1e-4)
    assert loss_of(1.5, 2.0, 0.5, clip=0.2)[0] == pytest.approx(-2.4, rel=1e-4)


def test_value_clip():
    """The new value is exact but differs from the old value by 1; clipped to a change of 0.2 its error is 0.8."""
    _, metrics = loss_of(1.0, 0.0, value_shift=1.0)
    assert metrics["value_loss"] == pytest.approx(0, abs=1e-6)
    _, metrics = loss_of(1.0, 0.0, value_shift=1.0, clip=0.2, value_clip=True)
    assert metrics["value_loss"] == pytest.approx(0.32, rel=1e-4)


def test_target_kl_ends_the_updates():
    _, learner, rollouts = collect(**{"algo.target_kl": 1e-9, "lr": 0.1})
    assert 1 < len(learner.learn(rollouts)) < 6  # the policy of the first update is the old one
    _, learner, rollouts = collect()
    assert len(learner.learn(rollouts)) == 6


def test_advantages_are_recomputed_after_a_change_of_the_scale():
    """PopArt's first updates change sigma; later updates must not use advantages in the old units."""
    options = {
        "critic": "popart",
        "algo.reward_scale": 1000.0,
        "algo.reward_clipping": "none",
        "algo.normalise_advantages": False,
    }
    _, learner, rollouts = collect(env="toy/catch", **options)
    mean_advantages: list[float] = []

    metrics: list[dict[str, float]] = []
    batches = learner.algorithm.batches(rollouts, learner.context())
    batch = next(batches)
    with contextlib.suppress(StopIteration):
        while True:
            mean_advantages.append(float(batch.rollout.extras["advantage"].abs().mean()))
            metrics.append(learner.update(batch))
            batch = batches.send(metrics[-1])
    assert metrics[0]["recomputed_updates"] == 1
    assert metrics[-1]["recomputed_updates"] == 0
    assert mean_advantages[0] > 5  # all advantages are bounded by 10
    assert max(mean_advantages[1:]) < 5


def test_rollouts_batches_and_updates_per_learn():
    algorithm = PPO(PPO.Options(rollout_length=128, sequence_length=8, minibatches=4, epochs=3))
    assert algorithm.rollouts_per_learn(32, pools=2) == 32
    assert algorithm.batch_size(32, pools=2) == 256
    assert LearnSizes.of(algorithm, 32, pools=2).max_updates() == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algo.minibatches": 19}, "--algo.minibatches 19: must be at most 18, the number of sequences"),
        ({"algo.sequence_length": 5}, "--algo.sequence-length 5: must divide --rollout-length 12; try 4"),
        ({"runtime": "local", "lag": 1}, "--lag 1: .*on-policy"),
        ({"batch_size": 4}, "unknown option --batch-size"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        resolve({**SMALL, **options})


def test_local_with_one_pool_equals_serial():
    """Actors wait during updates, so both runtimes write the same bytes."""
    options = {**SMALL, "memory": "gru", "micro_batch_size": 2, "steps": 720}
    env = options.pop("env")
    one = bestiary.train(env, run_dir="a", **options)
    two = bestiary.train(env, run_dir="b", **{**options, "runtime": "local", "pools": 1})
    files = [next(run.path.glob("checkpoints/*/model.safetensors")).read_bytes() for run in (one, two)]
    assert files[0] == files[1]
    assert (one.path / "episodes.csv").read_bytes() == (two.path / "episodes.csv").read_bytes()


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_local_is_reproducible_without_policy_lag(memory):
    options = {**SMALL, "runtime": "local", "pools": 2, "memory": memory, "micro_batch_size": 2}
    env = options.pop("env")
    one, two = (bestiary.train(env, run_dir=f"r{i}", **options) for i in (1, 2))
    files = [next(run.path.glob("checkpoints/*/model.safetensors")).read_bytes() for run in (one, two)]
    assert files[0] == files[1]
    assert one.metrics["max_policy_lag"].max() <= 5  # only the updates on the same rollout


def test_learns_catch():
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 32, "rollout_length": 32, "lr": 1e-3, "seed": 1}
    run = bestiary.train("toy/catch", algo="ppo", run_dir="r", steps="40k", **options)
    assert run.metrics["return"][-5:].mean() > 0.8
    assert bestiary.evaluate(run, episodes=100, greedy=True).mean > 0.9


def test_influence_aware_memory_learns_to_recall():
    """Four signs, four steps of delay: the return without memory is 0.25."""
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 32, "rollout_length": 30, "lr": 3e-3, "seed": 1}
    components: dict[str, Any] = {
        "agent": "iam",
        "agent.dset": "static",
        "memory.hidden": 32,
        "torso.sizes": (32,),
        "algo.sequence_length": 10,
    }
    run = bestiary.train("toy/recall", algo="ppo", run_dir="r", steps="50k", size=4, delay=4, **options, **components)
    assert run.metrics["return"][-3:].mean() > 0.9
