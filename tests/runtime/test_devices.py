"""Devices: what can be tested of GPUs without one."""

import math

import pytest
import torch

from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.runtime.devices import choose_device
from bestiary.runtime.learner import Learner
from bestiary.runtime.train import build

META = torch.device("meta")
OPTIONS = {
    "env": "atari/Pong",
    "runtime": "serial",
    "num_envs": 4,
    "batch_size": 4,
    "unroll_length": 3,
    "device": "cpu",
}


def test_devices_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda:0")
    assert choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="this machine has 2 CUDA devices"):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="this machine has no CUDA devices"):
        choose_device("cuda")
    for nonsense in ("gpu", "cuda:x", "vulkan", ""):
        with pytest.raises(UserError, match="expected auto, cpu, cuda"):
            choose_device(nonsense)


@pytest.mark.parametrize("torso", ["shallow", "resnet", "mlp"])
def test_an_update_with_every_tensor_on_another_device(torso: str) -> None:
    """The meta device has shapes but no numbers: a tensor left behind on the CPU makes an operation fail."""
    (actor,), learner = build(resolve({**OPTIONS, "torso": torso}))
    actor.start()
    rollout = actor.collect().to(META)
    actor.pool.close()
    moved = Learner(learner.agent.to(META), learner.algorithm, 1000, group_size=2, device=META)
    found = moved.gradients(rollout)
    gradients, sums = found.parameters, found.sums
    moved._step(gradients, torch.nn.utils.get_total_norm(gradients), 1e-3)
    everything = [*gradients, *sums.values(), *moved.parameters, *moved.save()["optimizer"].values()]
    assert {tensor.device.type for tensor in everything if tensor.ndim} == {"meta"}
    assert [g.shape for g in gradients] == [p.shape for p in moved.parameters]


def test_bfloat16_stays_inside_the_network() -> None:
    (actor,), learner = build(resolve({**OPTIONS, "precision": "bfloat16"}))
    seen = []
    learner.agent.policy.register_forward_hook(lambda *args: seen.append(args[-1].dtype))  # type: ignore[attr-defined]
    actor.start()
    rollout = actor.collect()
    (metrics,) = learner.learn([rollout])
    actor.pool.close()
    assert set(seen) == {torch.bfloat16}
    assert rollout.log_prob.dtype == rollout.value.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in learner.parameters)
    assert all(math.isfinite(value) for value in metrics.values())


def test_bfloat16_gives_nearly_the_same_gradient() -> None:
    (actor,), learner = build(resolve(OPTIONS))
    actor.start()
    rollout = actor.collect()
    actor.pool.close()
    whole = learner.gradients(rollout).parameters
    learner.precision = "bfloat16"
    half = learner.gradients(rollout).parameters
    a, b = torch.cat([g.flatten() for g in whole]), torch.cat([g.flatten() for g in half])
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.98
