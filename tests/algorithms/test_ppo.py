"""PPO: what it learns from, what it computes, and that it composes with every memory and agent."""

import math
from typing import Any

import pytest
import torch

import bestiary
from bestiary.agents import AGENTS
from bestiary.agents.memories import MEMORIES
from bestiary.algorithms.algorithm import updates
from bestiary.algorithms.gae import gae
from bestiary.algorithms.ppo import PPO
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.rollout import Rollout
from bestiary.runtime.build import build
from bestiary.runtime.serial import play

SMALL: dict[str, Any] = {
    "env": "toy/recall",
    "algo": "ppo",
    "runtime": "serial",
    "num_envs": 6,
    "rollout_length": 12,
    "algo.sequence": 4,
    "algo.minibatches": 3,
    "algo.epochs": 2,
    "steps": 720,
}


def played(**options: Any):
    (actor,), learner = build(resolve({**SMALL, **options}))
    actor.start()
    return actor, learner, play(actor, learner)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("agent", [name for name, agent in AGENTS.items() if "memory" in getattr(agent, "parts", ())])
@pytest.mark.parametrize("env", ["toy/recall", "toy/catch"])
def test_the_ratio_is_one_before_the_first_step(env, agent, memory):
    """Old and new policy agree on every sequence, whatever carries over from the one before and resets inside."""
    actor, learner, rollouts = played(env=env, agent=agent, memory=memory)
    rollouts = play(actor, learner)  # the second time, so that memories and episodes are under way
    whole = learner.algorithm.prepare(learner.agent, rollouts)
    with torch.no_grad():
        output, _ = learner.agent(whole.inputs()[: whole.length], whole.state)
        ratio = (output.distribution.log_prob(whole.action) - whole.log_prob).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
        torch.testing.assert_close(output.value, whole.value, atol=1e-5, rtol=1e-4)


def test_every_decision_is_learnt_from_once_an_epoch():
    _actor, learner, rollouts = played()
    for number, rollout in enumerate(rollouts):
        rollout.log_prob[:] = 0
        rollout.value[:] = (
            torch.arange(rollout.value.numel()).view_as(rollout.value) + 1000 * number
        )  # names of decisions
    seen: list[float] = []
    sizes = []

    def update(batch: Rollout) -> dict[str, float]:
        seen.extend(batch.value.flatten().tolist())
        sizes.append(batch.num_envs)
        return {"kl": 0.0}

    learner.algorithm.learn(learner.agent, rollouts, update, torch.Generator().manual_seed(0))
    everything = sorted(torch.cat([r.value.flatten() for r in rollouts]).tolist())
    half = len(seen) // 2
    assert sorted(seen[:half]) == sorted(seen[half:]) == everything
    assert seen[:half] != seen[half:]  # in another order
    assert sizes == [6] * 6


@pytest.mark.parametrize("horizon", [None, 6, 3])
def test_advantages_are_those_of_the_whole_rollout(horizon):
    """Cut into sequences and dealt over two pools, as over one stream of decisions; also where a horizon cuts elsewhere."""
    options = PPO.Options(
        rollout_length=12, sequence=4, minibatches=1, normalize=False, lam=0.9, discount=0.8, horizon=horizon
    )
    algorithm = PPO(options)
    actors, learner = build(resolve({**SMALL, "runtime": "local", "pools": 2, "num_envs": 4, "algo.minibatches": 1}))
    for actor in actors:
        actor.start()
    rollouts = [actor.collect() for _ in range(3) for actor in actors]
    whole = algorithm.prepare(learner.agent, rollouts)
    assert whole.num_envs == 12
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
            part = whole.columns(start, start + 2)
            torch.testing.assert_close(part.extras["advantage"], expected.advantages[4 * k : 4 * k + 4])
            torch.testing.assert_close(part.extras["target"], expected.targets[4 * k : 4 * k + 4])
            assert torch.equal(part.log_prob, chain[k].log_prob)
        actor.pool.close()


def test_normalised_advantages():
    _, learner, rollouts = played()
    advantage = learner.algorithm.prepare(learner.agent, rollouts).extras["advantage"]
    assert advantage.mean().item() == pytest.approx(0, abs=1e-5)
    assert advantage.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_a_time_limit_is_bootstrapped_and_an_end_is_not():
    def targets(value_of_final: float) -> torch.Tensor:
        _, learner, rollouts = played(env="toy/chain", time_limit=5, **{"algo.normalize": False})
        for rollout in rollouts:
            cut = rollout.truncated[1:]
            rollout.bootstrap = torch.where(cut, value_of_final, 0.0)
        whole = learner.algorithm.prepare(learner.agent, rollouts)
        assert whole.truncated.any()
        return whole.extras["target"][whole.truncated[1:]]

    torch.testing.assert_close(targets(10.0) - targets(0.0), torch.full_like(targets(0.0), 9.9))


def test_one_epoch_and_one_batch_is_a2c():
    _, learner, rollouts = played(**{"algo.epochs": 1, "algo.minibatches": 1, "algo.normalize": False})
    whole = learner.algorithm.prepare(learner.agent, rollouts)
    loss = learner.algorithm.loss(learner.agent, whole, 0.0).total
    output, _ = learner.agent(whole.inputs()[: whole.length], whole.state)
    advantage, target = whole.extras["advantage"], whole.extras["target"]
    a2c = (
        -(output.distribution.log_prob(whole.action) * advantage)
        + 0.25 * (target - output.value).square()
        - 0.01 * output.distribution.entropy()
    ).sum()
    for ours, theirs in zip(
        torch.autograd.grad(loss, learner.parameters), torch.autograd.grad(a2c, learner.parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def loss_of(ratio: float, advantage: float, progress: float = 0.0, value_shift: float = 0.0, **options: Any):
    """The loss on a rollout whose every decision has this ratio and advantage, without entropy."""
    algorithm = PPO(PPO.Options(entropy=0.0, **options))
    _, learner, (rollout, *_) = played()
    with torch.no_grad():
        output, _ = learner.agent(rollout.inputs()[: rollout.length], rollout.state)
    rollout.log_prob = output.distribution.log_prob(rollout.action) - math.log(ratio)
    rollout.value = output.value - value_shift
    batch = rollout.with_extras(target=output.value.clone(), advantage=torch.full_like(output.value, advantage))
    with torch.no_grad():
        found = algorithm.loss(learner.agent, batch, progress)
        loss, sums = found.total, found.sums
    return float(loss) / rollout.log_prob.numel(), {k: float(v) / rollout.log_prob.numel() for k, v in sums.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.05, 2.0, -2.1), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (1.5, -2.0, 3.0)],
)
def test_clipping(ratio, advantage, expected):
    loss, sums = loss_of(ratio, advantage, clip=0.2)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert sums["clipped"] == (abs(ratio - 1) > 0.2)
    assert sums["kl"] == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-3)


def test_the_clip_shrinks_with_the_run_where_asked():
    assert loss_of(1.5, 2.0, 0.5, clip=0.2, clip_schedule="linear")[0] == pytest.approx(-2.2, rel=1e-4)
    assert loss_of(1.5, 2.0, 0.5, clip=0.2)[0] == pytest.approx(-2.4, rel=1e-4)


def test_value_clip():
    """The new value is right but 1 away from the old: with the clip, that is as bad as 0.8 off."""
    assert loss_of(1.0, 0.0, value_shift=1.0)[1]["value_loss"] == pytest.approx(0, abs=1e-6)
    assert loss_of(1.0, 0.0, value_shift=1.0, clip=0.2, value_clip=True)[1]["value_loss"] == pytest.approx(
        0.32, rel=1e-4
    )


def test_target_kl_ends_the_passes():
    _, learner, rollouts = played(**{"algo.target_kl": 1e-9, "lr": 0.1})
    assert 1 < len(learner.learn(rollouts)) < 6  # the first update's policy is still the old one
    _, learner, rollouts = played()
    assert len(learner.learn(rollouts)) == 6


def test_advantages_are_measured_by_the_scale_that_popart_has_now():
    """Its first updates move it; the ones after those do not go by what it was when the rollout was prepared."""
    options = {"critic": "popart", "algo.reward_scale": 1000.0, "algo.reward": "none", "algo.normalize": False}
    _, learner, rollouts = played(env="toy/catch", **options)
    sizes: list[float] = []
    update = learner.update

    def watched(batch: Rollout) -> dict[str, float]:
        sizes.append(float(batch.extras["advantage"].abs().mean()))
        return update(batch)

    found = learner.algorithm.learn(learner.agent, rollouts, watched, torch.Generator().manual_seed(0))
    assert found[0]["unfit"] == 1
    assert found[-1]["unfit"] == 0
    assert sizes[0] > 50
    assert max(size for size, before in zip(sizes[1:], found, strict=False) if not before["unfit"]) < 5


def test_counts():
    algorithm = PPO(PPO.Options(rollout_length=128, sequence=8, minibatches=4, epochs=3))
    assert algorithm.rollouts(32, pools=2) == 32
    assert algorithm.batch_size(32, pools=2) == 256
    assert updates(algorithm, 32, pools=2) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algo.minibatches": 5}, "--algo.minibatches 5 does not divide the 18 sequences of a rollout"),
        ({"algo.sequence": 5}, "--algo.sequence 5 does not divide --rollout-length 12; try 4"),
        ({"runtime": "local", "lag": 1}, "--lag 1: this algorithm learns only from its newest weights"),
        ({"batch_size": 4}, "unknown option --batch-size"),
    ],
)
def test_what_cannot_be_cut_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        resolve({**SMALL, **options})


def test_local_with_one_pool_is_serial():
    """Actors wait while PPO learns, so threads change nothing: the same bytes."""
    options = {**SMALL, "memory": "gru", "group_size": 2, "steps": 720}
    env = options.pop("env")
    one = bestiary.train(env, run_dir="a", **options)
    two = bestiary.train(env, run_dir="b", **{**options, "runtime": "local", "pools": 1})
    files = [next(run.path.glob("checkpoints/*/model.safetensors")).read_bytes() for run in (one, two)]
    assert files[0] == files[1]
    assert (one.path / "episodes.csv").read_bytes() == (two.path / "episodes.csv").read_bytes()


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_local_is_reproducible_and_has_no_lag(memory):
    options = {**SMALL, "runtime": "local", "pools": 2, "memory": memory, "group_size": 2}
    env = options.pop("env")
    one, two = (bestiary.train(env, run_dir=f"r{i}", **options) for i in (1, 2))
    files = [next(run.path.glob("checkpoints/*/model.safetensors")).read_bytes() for run in (one, two)]
    assert files[0] == files[1]
    assert one.metrics["max_lag"].max() <= 5  # only the updates made of the same rollout


def test_learns_catch():
    """In one deterministic thread: what is learnt here is learnt everywhere."""
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 32, "rollout_length": 32, "lr": 1e-3, "seed": 1}
    run = bestiary.train("toy/catch", algo="ppo", run_dir="r", steps="40k", **options)
    assert run.metrics["return"][-5:].mean() > 0.8
    assert run.evaluate(episodes=100, greedy=True).mean > 0.9


def test_an_influence_aware_memory_learns_to_recall():
    """Four signs through four dark steps: 0.25 without a memory, and the agent's other path has none."""
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 32, "rollout_length": 30, "lr": 3e-3, "seed": 1}
    parts: dict[str, Any] = {
        "agent": "iam",
        "agent.dset": "static",
        "memory.hidden": 32,
        "torso.sizes": (32,),
        "algo.sequence": 10,
    }
    run = bestiary.train("toy/recall", algo="ppo", run_dir="r", steps="50k", size=4, delay=4, **options, **parts)
    assert run.metrics["return"][-3:].mean() > 0.9
