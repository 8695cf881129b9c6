"""PPG: phases, which parameters each update changes, losses against a slow implementation, exact resume, learning."""

from typing import Any

import pytest
import torch

import bestiary
from bestiary.config.resolve import resolve
from bestiary.rollout import Rollout
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts
from bestiary.utils.errors import UserError

OPTIONS: dict[str, Any] = {
    "env": "toy/catch",
    "algo": "ppg",
    "runtime": "serial",
    "num_envs": 4,
    "rollout_length": 10,
    "algo.sequence_length": 5,
    "algo.minibatches": 2,
    "algo.aux_interval": 2,
    "algo.aux_epochs": 3,
    "algo.aux_batch_size": 8,
    "algo.lr_schedule": "constant",
    "torso": "mlp",
    "steps": 4_000,
}
SHARED = {"algo.value_network": "shared"}


def make(**options: Any) -> tuple[Any, Any]:
    (actor,), learner = make_actors_and_learner(resolve({**OPTIONS, **options}))
    actor.start()
    return actor, learner


def play_batches(learner: Any, rollouts: list[Rollout]) -> list[Any]:
    """Return the batches without updating the weights."""
    return list(learner.algorithm.batches(rollouts, learner.context()))


def snapshot(parameters: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def changed(parameters: Any, before: list[torch.Tensor]) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(parameters, before, strict=True)]


@pytest.mark.parametrize("value_network", ["shared", "separate"])
def test_an_auxiliary_phase_follows_each_policy_phase(value_network: str) -> None:
    actor, learner = make(**{"algo.value_network": value_network})
    first = play_batches(learner, collect_rollouts(actor, learner))
    assert [batch.optimizer for batch in first] == ["policy", "value"] * 2
    second = play_batches(learner, collect_rollouts(actor, learner))
    # The 2 rollouts of the phase are 2 x 4 x 10 / 5 = 16 sequences: 3 epochs of 2 batches.
    auxiliary = ["aux"] if value_network == "shared" else ["aux", "value"]
    assert [batch.optimizer for batch in second] == ["policy", "value"] * 2 + auxiliary * 6
    log_probs = torch.cat([batch.rollout.log_prob for batch in second[4:] if batch.optimizer == "aux"], dim=1)
    columns = [tuple(column) for column in log_probs.T.tolist()]
    assert len(columns) == 48
    assert all(columns.count(column) == 3 for column in set(columns))
    assert learner.algorithm.stored == []


@pytest.mark.parametrize("layers", [None, (8,)])
@pytest.mark.parametrize("value_network", ["shared", "separate"])
def test_each_update_changes_only_its_own_parameters(value_network: str, layers: tuple[int, ...] | None) -> None:
    """Layers before the critic belong to the value head, layers before the policy head to the policy."""
    heads = {"agent.policy_layers": layers, "agent.value_layers": layers}
    actor, learner = make(**{"algo.value_network": value_network, **heads})
    agent = learner.agent
    batches = [play_batches(learner, collect_rollouts(actor, learner)) for _ in range(2)][1]
    own = list(learner.algorithm.parameters().values())
    assert bool(own) == (value_network == "separate")
    policy, value, aux = batches[0], batches[1], batches[4]
    critic = [name.startswith(("critic", "value_mlp")) for name, _ in agent.named_parameters()]

    before = snapshot([*agent.parameters(), *own])
    learner.update(policy)
    assert changed([*agent.parameters(), *own], before) == [*(not c for c in critic), *(False for _ in own)]

    before = snapshot([*agent.parameters(), *own])
    learner.update(value)
    in_critic = critic if value_network == "shared" else [False for _ in critic]
    # The value network is a copy of the agent, whose policy head is not used.
    used = [not name.startswith("policy") for name in learner.algorithm.parameters()]
    assert changed([*agent.parameters(), *own], before) == [*in_critic, *used]

    before = snapshot([*agent.parameters(), *own])
    learner.update(aux)
    found = changed([*agent.parameters(), *own], before)
    assert any(found[: len(critic)])
    assert not any(found[len(critic) :])


def test_values_and_advantages_come_from_the_separate_value_network() -> None:
    actor, learner = make(**{"algo.lam": 0.0, "algo.normalise_advantages": False})
    with torch.no_grad():
        for parameter in learner.algorithm.parameters().values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    rollouts = collect_rollouts(actor, learner)
    batch = play_batches(learner, rollouts)[0].rollout
    with torch.no_grad():
        output, _ = learner.algorithm.value_agent(batch.inputs(), ())
        agent_output, _ = learner.agent(batch.inputs(), ())
    assert not torch.allclose(batch.value, agent_output.value[:-1], atol=1e-3)
    torch.testing.assert_close(batch.value, output.value[:-1], rtol=1e-4, atol=1e-5)
    for t in range(batch.length):
        for b in range(batch.num_envs):
            following = 0.0 if batch.done[t + 1, b] else 0.999 * float(output.value[t + 1, b])
            target = float(batch.reward[t + 1, b]) + following
            assert float(batch.extras["target"][t, b]) == pytest.approx(target, abs=1e-4)
            advantage = target - float(output.value[t, b])
            assert float(batch.extras["advantage"][t, b]) == pytest.approx(advantage, abs=1e-4)


def test_losses_equal_a_slow_implementation() -> None:
    actor, learner = make(**SHARED, **{"algo.clone_coef": 0.7, "algo.entropy_coef": 0.05, "memory": "gru"})
    batches = [play_batches(learner, collect_rollouts(actor, learner)) for _ in range(2)][1]
    with torch.no_grad():
        for parameter in learner.agent.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    policy, value, aux = batches[0].rollout, batches[1].rollout, batches[4].rollout
    algorithm = learner.algorithm

    def outputs(batch: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            output, _ = learner.agent(batch.inputs()[: batch.length], batch.state)
        return torch.softmax(output.distribution.logits, -1), output.value

    probs, _ = outputs(policy)
    expected = 0.0
    for t in range(policy.length):
        for b in range(policy.num_envs):
            advantage = float(policy.extras["advantage"][t, b])
            ratio = float(probs[t, b, policy.action[t, b]] / policy.log_prob[t, b].exp())
            expected -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            expected -= 0.05 * -sum(float(p * p.log()) for p in probs[t, b])
    assert float(algorithm.loss(learner.agent, policy, 0.0).total.detach()) == pytest.approx(expected, rel=1e-4)

    _, values = outputs(value)
    expected = 0.5 * 0.5 * float((values - value.extras["target"]).square().sum())
    assert float(algorithm.value_loss(learner.agent, value, 0.0).total.detach()) == pytest.approx(expected, rel=1e-4)

    probs, values = outputs(aux)
    old = torch.softmax(aux.extras["old_logits"], -1)
    expected = 0.0
    for t in range(aux.length):
        for b in range(aux.num_envs):
            expected += 0.5 * float(values[t, b] - aux.extras["target"][t, b]) ** 2
            expected += 0.7 * sum(float(p * (p / q).log()) for p, q in zip(old[t, b], probs[t, b], strict=True))
    assert float(algorithm.joint_loss(learner.agent, aux, 0.0).total.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {**SHARED, "memory": "lstm"}], ids=["separate", "shared"])
def test_resumed_run_equals_an_uninterrupted_run(options: dict[str, Any]) -> None:
    """The run is interrupted within a policy phase, so that its stored rollouts are part of the checkpoint."""
    given = {**OPTIONS, **options, "steps": 200}
    uninterrupted = bestiary.train(**given, run_dir="uninterrupted")
    half = bestiary.train(**{**given, "steps": 120, "run_dir": "resumed"})
    assert half.checkpoints[-1].load_learner()["algorithm"]["state.num_stored"] == 1
    resumed = bestiary.resume(half, steps=200)
    expected, found = (run.checkpoints[-1].load_learner() for run in (uninterrupted, resumed))
    for file, tensors in expected.items():
        assert tensors.keys() == found[file].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[file][name]), f"{file} {name}"


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(UserError, match=r"--algo.value-network separate: .*memory.*shared"):
        make(memory="gru")
    with pytest.raises(UserError, match=r"--critic popart: not supported by --algo ppg"):
        make(critic="popart")
    with pytest.raises(UserError, match=r"--algo.value-clip: not supported[^\n]*\n--algo.target-kl: not supported"):
        make(**{"algo.value_clip": True, "algo.target_kl": 0.1})
    with pytest.raises(UserError, match=r"--learners 2: .*only one learner"):
        resolve({**OPTIONS, "runtime": "cluster", "cluster": "local", "learners": 2})
