"""Warm start (--init-from): which weights of another run are loaded, and which are initialised again."""

from typing import Any

import pytest
import torch

import bestiary
from bestiary.config.resolve import resolve
from bestiary.runs import checkpoints
from bestiary.training.warm_start import load_pretrained
from bestiary.utils.errors import UserError

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 8,
    "torso": "mlp",
    "torso.width": 16,
    "save_every": 0,
}


def test_matching_weights_are_loaded():
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "torso.width": 16, "steps": 80}
    options["critic.debias"] = False  # so that the loaded statistics hardly change
    first = bestiary.train("atari/{Pong,Carnival}", run_dir="first", critic="popart", **options)
    second = bestiary.train(
        "atari/{Carnival,SpaceInvaders}",
        run_dir="second",
        critic="popart",
        init_from="first",
        **{**options, "lr": 1e-30},
    )
    old, new = (checkpoints.choose(run.path).load_model() for run in (first, second))
    for name in old:
        if name.startswith(("torso", "policy")):
            torch.testing.assert_close(new[name], old[name])
    torch.testing.assert_close(new["critic.nu"][0], old["critic.nu"][1], rtol=0.1, atol=0.1)  # statistics of Carnival


def test_components_of_the_source_agent_are_used_by_default():
    """`train atari/Pong --init-from RUN` uses 18 actions, no mean subtraction, and the network and critic of RUN."""
    small: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "steps": 80}
    components: dict[str, Any] = {
        "torso": "shallow",
        "torso.width": 16,
        "torso.subtract_mean": False,
        "memory": "gru",
        "memory.hidden": 8,
    }
    first = bestiary.train("atari/{Pong,Breakout}", run_dir="first", critic="popart", **small, **components)
    second = bestiary.train("atari/Pong", run_dir="second", init_from="first", **{**small, "lr": 1e-30})
    assert second.config.components["torso"] == first.config.components["torso"]
    assert second.config.components["critic"].name == "popart"
    assert second.config.env_options.full_actions
    old, new = (checkpoints.choose(run.path).load_model() for run in (first, second))
    for name in old:
        if not name.startswith("critic"):
            torch.testing.assert_close(new[name], old[name])


def test_critic_of_another_type_is_initialised_again(capsys):
    """Weights of normalised values have another meaning for a critic without normalisation."""
    small: dict[str, Any] = {
        "runtime": "serial",
        "num_envs": 4,
        "batch_size": 4,
        "steps": 80,
        "torso": "mlp",
        "torso.width": 16,
    }
    bestiary.train("toy/catch", run_dir="first", critic="popart", **small)
    for seed, critic, source in ((2, "shared", "first"), (3, "popart", "second")):
        capsys.readouterr()
        options = {**small, "lr": 1e-30, "seed": seed, "critic": critic, "init_from": source}
        run = bestiary.train("toy/catch", run_dir="second" if source == "first" else "third", **options)
        assert "new critic outputs for toy/catch" in capsys.readouterr().err
        old, new = (checkpoints.choose(r.path).load_model() for r in (bestiary.load(source), run))
        assert torch.equal(old["policy.weight"], new["policy.weight"])
        assert not torch.allclose(old["critic.weight"], new["critic.weight"], rtol=0.01)


def test_shared_critic_is_loaded_for_tasks_of_any_name(capsys):
    small: dict[str, Any] = {**SMALL, "steps": 80}
    first = bestiary.train("toy/catch", run_dir="first", **{**small, "batch_size": 4, "num_envs": 4})
    second = bestiary.train("toy/catch", run_dir="second", init_from="first", **{**small, "lr": 1e-30})
    old, new = (checkpoints.choose(run.path).load_model() for run in (first, second))
    torch.testing.assert_close(new["critic.weight"], old["critic.weight"])
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "torso.width": 16, "steps": 80}
    first = bestiary.train("atari/Pong", run_dir="pong", **options)
    capsys.readouterr()
    second = bestiary.train("atari/Carnival", run_dir="carnival", init_from="pong", **{**options, "lr": 1e-30})
    old, new = (checkpoints.choose(run.path).load_model() for run in (first, second))
    torch.testing.assert_close(new["critic.weight"], old["critic.weight"])
    assert "new critic outputs" not in capsys.readouterr().err


def test_popart_adapts_to_another_scale_of_returns_after_a_warm_start():
    """The count of updates starts at 0, so that sigma grows from the returns of the source run to those of this run."""
    options: dict[str, Any] = {"num_envs": 4, "batch_size": 4, "rollout_length": 5, "log_every": 20, "critic": "popart"}
    options |= {"runtime": "serial", "torso": "mlp", "torso.width": 16}
    small = bestiary.train("toy/catch", run_dir="small", **{**options, "steps": 2_400, "algo.reward_scale": 0.01})
    source = checkpoints.choose(small.path).load_model()
    assert source["critic.updates"] > 50
    assert source["critic.sigma"] < 0.5
    options |= {"steps": 400, "init_from": "small", "algo.reward_scale": 100.0}
    large = bestiary.train("toy/catch", run_dir="large", **options)
    assert large.metrics["recomputed_updates"][:8].max() > 0  # after the first finished game
    assert large.metrics["toy/catch/sigma"][-1] > 20
    assert max(large.metrics["value_loss"]) <= 0.5 * 10**2  # errors are bounded by 10 standard deviations


def test_different_actions_at_the_same_index_are_reported():
    """Qbert and Pong have six actions each, but only Qbert has UP and DOWN."""
    small: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "steps": 80, "torso.width": 16}
    pong = bestiary.train("atari/Pong", run_dir="pong", **small)
    for inputs, warning in (("auto", "RIGHT in the source run is UP in this run"), ("none", "")):
        config = resolve({"env": "atari/Qbert", "torso.width": 16, "agent.extra_inputs": inputs})
        if not warning:
            pong = bestiary.train("atari/Pong", run_dir="blind", **{**small, "agent.extra_inputs": "none"})
        description = load_pretrained(config.make_agent(), config.interface, pong)
        assert "new policy outputs for UP, DOWN" in description
        assert warning in description
        assert ("matched by index" in description) == bool(warning)


def test_different_number_of_actions_is_rejected():
    small: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "steps": 80, "torso.width": 16}
    bestiary.train("atari/Breakout", run_dir="four", **small)
    with pytest.raises(UserError, match=r"source run has 4 actions, this run has 6 \(with --full-actions"):
        bestiary.train("atari/Pong", run_dir="six", init_from="four", **small)


def test_weights_of_another_shape_are_rejected():
    bestiary.train("toy/catch", run_dir="small", steps=80, **SMALL)
    with pytest.raises(UserError) as caught:
        bestiary.train("toy/catch", run_dir="large", init_from="small", **{**SMALL, "torso.width": 32})
    (problem,) = caught.value.problems
    assert "torso.layers.0.weight: shape [16, 50] in the source run, [32, 50] in this run" in problem
    with pytest.raises(UserError, match="there is no such run"):
        bestiary.train("toy/catch", run_dir="large", init_from="smal", **SMALL)
