"""The agent of an imported checkpoint computes the same logits and values as a re-creation of the original network."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bestiary.compat.import_checkpoint import import_checkpoint
from bestiary.rollout import Inputs
from bestiary.runs.run import Run, RunLocation
from tests.compat.recreated_networks import AtariNet, PopArtHead, ProcGenNet, Recreation, ResNet, checkpoint_of, init_

T, B = 6, 3
TORCHBEAST: dict[str, Any] = {
    "xpid": "example",
    "num_actors": 45,
    "total_steps": 30_000_000,
    "batch_size": 4,
    "unroll_length": 80,
    "entropy_cost": 0.01,
    "baseline_cost": 0.5,
    "discounting": 0.99,
    "reward_clipping": "abs_one",
    "learning_rate": 0.0004,
    "alpha": 0.99,
    "momentum": 0.0,
    "epsilon": 0.01,
    "grad_norm_clipping": 40.0,
    "use_lstm": False,
    "device": torch.device("cpu"),
}
MONO = {**TORCHBEAST, "env": "PongNoFrameskip-v4", "num_buffers": 60}
POLY = {**TORCHBEAST, "pipes_basename": "unix:/tmp/polybeast", "num_inference_threads": 2}
SIX = {"env": "six", "num_actors": 48, "batch_size": 8, "use_popart": True, "beta": 1e-4, "num_tasks": 6}
POPART = {**POLY, **SIX, "reward_clipping": "none"}
REWARD = {
    **MONO,
    "env": "RiverraidNoFrameskip-v4",
    "fuel_multiplier": -20.0,
    "move_penalty": 0.0,
    "true_move_penalty": 0.0,
    "hidden_size": 64,
    "num_layers": 3,
}
PROCGEN = {
    **TORCHBEAST,
    "pipes_basename": "unix:/tmp/polybeast",
    "env": "procgen:procgen-maze-v0",
    "multi_env": 2,
    "distribution_mode": "easy",
    "num_levels": 200,
    "num_actors": 48,
    "batch_size": 32,
    "unroll_length": 50,
    "hidden_size": 16,
    "num_layers": 2,
    "num_head": 2,
    "dim_head": 8,
    "dim_ff": 24,
}


def write(folder: Path, network: Recreation, flags: dict[str, Any], legacy: bool = False, **more: Any) -> Path:
    """Write a checkpoint of the network, with 1,000 updates, and return its path."""
    path = folder / "model.tar"
    data = {**checkpoint_of(network, flags, updates=1000), **more}
    torch.save(data, path, _use_new_zipfile_serialization=not legacy)
    return path


def import_to(folder: Path, path: Path, **options: Any) -> Run:
    return import_checkpoint(path, RunLocation(run_dir=str(folder / "run")), **options)


def random_inputs(channels: int, size: int, actions: int, tasks: int, seed: int = 0) -> Inputs:
    """Return inputs [T,B] with resets at several entries and with rewards and actions of the previous episode there."""
    generator = torch.Generator().manual_seed(seed)
    done = torch.rand(T, B, generator=generator) < 0.3
    done[0] = True
    return Inputs(
        {"image": torch.randint(0, 256, (T, B, channels, size, size), dtype=torch.uint8, generator=generator)},
        10 * torch.randn(T, B, generator=generator),
        done,
        torch.randint(0, actions, (T, B), generator=generator),
        torch.arange(B).remainder(tasks).expand(T, B).contiguous(),
    )


@torch.no_grad()
def outputs_of_original(network: Recreation, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return logits [T,B,A] and the values [T,B] of each entry's own task."""
    steps = [
        {
            "frame": inputs.observation["image"][t],
            "reward": inputs.reward[t],
            "done": inputs.done[t],
            "last_action": inputs.last_action[t],
        }
        for t in range(T)
    ]
    logits, values, _ = network(steps, network.initial_state(B))
    return logits, values.gather(-1, inputs.task.clamp(max=values.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def outputs_of_import(run: Run, inputs: Inputs, at_once: bool) -> tuple[Tensor, Tensor]:
    """Return logits and values, computed in one call or step by step."""
    agent = run.agent()
    state = agent.initial_state(B)
    slices = [slice(0, T)] if at_once else [slice(t, t + 1) for t in range(T)]
    logits, values = [], []
    for entries in slices:
        output, state = agent(inputs[entries], state)
        logits.append(output.distribution.logits)
        values.append(output.value)
    return torch.cat(logits), torch.cat(values)


def popart_net(lstm: bool) -> ResNet:
    network = ResNet(6, lstm, popart_tasks=6, clamp=False)
    network.baseline.mu.copy_(torch.tensor([221.2, 1646.8, 438.9, 217.6, 0.9136, 111.5]))
    network.baseline.sigma.copy_(torch.tensor([35.25, 428.9, 73.4, 36.1, 0.28, 29.8]))
    return network


def popart_shallow_net(lstm: bool) -> AtariNet:
    """Return the small network of the PopArt fork's MonoBeast: its values have the statistics mu and sigma."""
    network = AtariNet(6, lstm)
    network.baseline = PopArtHead(network.policy.in_features, tasks=6)
    network.baseline.mu.copy_(torch.tensor([0.5, -2.0, 0.0, 1.0, 0.9136, 3.0]))
    network.baseline.sigma.copy_(torch.tensor([2.0, 0.5, 1.0, 0.1, 0.28, 4.0]))
    return network


def no_carry_net() -> ProcGenNet:
    network = ProcGenNet("srwm")
    network.resets_every_step = True
    return network


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "mono": (lambda: AtariNet(6, lstm=False), MONO, {}),
    "mono-lstm": (lambda: AtariNet(6, lstm=True), {**MONO, "use_lstm": True}, {}),
    "reward-fork": (lambda: AtariNet(18, lstm=False, width=64, depth=3), REWARD, {}),
    "poly": (lambda: ResNet(6), POLY, {"envs": ["atari/Pong"]}),
    "poly-lstm": (lambda: ResNet(6, lstm=True), {**POLY, "use_lstm": True}, {"envs": ["PongNoFrameskip-v4"]}),
    "popart": (lambda: popart_net(lstm=False), POPART, {}),
    "popart-lstm": (lambda: popart_net(lstm=True), {**POPART, "use_lstm": True}, {}),
    "popart-mono": (lambda: popart_shallow_net(lstm=False), {**MONO, **SIX, "reward_clipping": "none"}, {}),
    "popart-mono-lstm": (lambda: popart_shallow_net(lstm=True), {**MONO, **SIX, "use_lstm": True}, {}),
    "popart-fork-one-task": (
        lambda: ResNet(6, popart_tasks=1),
        {**POLY, "env": "PongNoFrameskip-v4", "use_popart": False, "beta": 1e-4},
        {},
    ),
    "procgen-ff": (lambda: ResNet(15, channels=3), PROCGEN, {}),
    "delta": (lambda: ProcGenNet("delta"), {**PROCGEN, "use_delta": True}, {}),
    "srwm": (lambda: ProcGenNet("srwm"), {**PROCGEN, "use_sr": True}, {}),
    "fake-sr": (lambda: ProcGenNet("fake-sr"), {**PROCGEN, "use_psr": True}, {}),
    "sr-delta": (lambda: ProcGenNet("sr-delta"), {**PROCGEN, "use_smfwp": True}, {}),
    "srwm-no-carry": (no_carry_net, {**PROCGEN, "use_no_carry_sr": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_the_original(tmp_path: Path, case: str) -> None:
    make_network, flags, options = CASES[case]
    network = make_network()
    init_(network, seed=1)
    run = import_to(tmp_path, write(tmp_path, network, flags, legacy=case == "mono"), **options)
    interface = run.config.interface
    channels, size, _ = interface.observation_spec["image"].shape
    inputs = random_inputs(channels, size, interface.action_spec.n, len(interface.tasks))
    logits, values = outputs_of_original(network, inputs)
    for at_once in (True, False):
        own_logits, own_values = outputs_of_import(run, inputs, at_once)
        # `Categorical` may normalise logits, so differences of logits are compared.
        torch.testing.assert_close(own_logits.log_softmax(-1), logits.log_softmax(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own_values, values, rtol=1e-5, atol=1e-5)
    assert logits.std(0).min() > 1e-3, "the outputs must depend on the inputs"


def test_configuration_follows_from_the_flags(tmp_path: Path) -> None:
    network = AtariNet(18, lstm=True, width=32, depth=2)
    run = import_to(tmp_path, write(tmp_path, network, {**REWARD, "use_lstm": True, "hidden_size": 32}))
    config = run.config
    algo = config.components["algo"].options
    assert config.envs == ("atari/Riverraid",)
    assert config.training.reward == "pacifist:20"
    assert (algo.lr, algo.entropy_coef, algo.batch_size, algo.rollout_length) == (4e-4, 0.01, 4, 80)
    assert (algo.optimizer, algo.lam, algo.reward_clipping) == ("rmsprop", 1.0, "abs_one")
    assert (config.components["torso"].options.width, config.components["torso"].options.depth) == (32, 2)
    assert (config.components["memory"].options.hidden, config.components["memory"].options.layers) == (51, 2)
    assert config.training.steps == 30_000_000
    assert run.steps == 1000 * 4 * 80  # MonoBeast saves no step; the learning-rate scheduler counts updates


def test_popart_statistics_are_exact(tmp_path: Path) -> None:
    network = popart_net(lstm=False)
    run = import_to(tmp_path, write(tmp_path, network, POPART, stats={"step": 300_014_720}))
    critic: Any = run.agent().critic  # type: ignore[attr-defined]
    assert torch.equal(critic.mu, network.baseline.mu.double())
    assert torch.equal(critic.sigma, network.baseline.sigma.double())
    assert torch.allclose(critic.nu - critic.mu**2, critic.sigma**2)
    assert run.config.envs[0] == "atari/AirRaid"
    assert len(run.config.envs) == 6
    assert run.steps == 300_014_720
    options = run.config.components["critic"].options
    assert (options.beta, options.average, options.debias) == (4e-4, "deviations", False)


@pytest.mark.parametrize("case", ["mono-lstm", "popart", "srwm"])
def test_optimizer_state_belongs_to_the_same_parameters(tmp_path: Path, case: str) -> None:
    make_network, flags, options = CASES[case]
    network = make_network()
    data = checkpoint_of(network, flags, updates=10)
    torch.save(data, tmp_path / "model.tar")
    run = import_to(tmp_path, tmp_path / "model.tar", **options)
    saved = run.checkpoints[-1].load_learner()["optimizer"]
    names = list(dict(run.agent().named_parameters()))
    original_names = [name for name, _ in network.named_parameters()]

    def original(name: str) -> Tensor:
        return data["optimizer_state_dict"]["state"][original_names.index(name)]["square_avg"]

    pairs = {
        "mono-lstm": {"memory.core.bias_hh_l1": "core.bias_hh_l1", "torso.convolutions.4.weight": "conv3.weight"},
        "popart": {"critic.weight": "baseline.weight", "torso.convolutions.7.second.bias": "resnet2.1.3.bias"},
        "srwm": {"policy.bias": "policy.bias", "memory.mixers.1.matrix.base.3": "core.sr_layers.1.w_b"},
    }
    assert len(saved) == 2 * len(names)  # step and square_avg
    for own, other in pairs[case].items():
        found = saved[f"{names.index(own)}.square_avg"]
        assert torch.equal(found, original(other).reshape(found.shape))


def test_statistics_of_polybeast_with_numbers_of_numpy_are_accepted(tmp_path: Path) -> None:
    stats = {"step": 6400, "episode_returns": tuple(np.array([1.5, -3.0], np.float32)), "mean_episode_return": 0.5}
    run = import_to(tmp_path, write(tmp_path, ResNet(6), POLY, stats=stats), envs=["atari/Pong"])
    assert run.steps == 6400
