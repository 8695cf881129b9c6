"""Devices: what can be tested of GPUs without one."""

import math
from dataclasses import replace

import pytest
import torch

from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.runtime.build import build, make_layout
from bestiary.runtime.devices import choose_device, placement
from bestiary.runtime.learner import Learner
from bestiary.runtime.probe import choose_group_size
from bestiary.runtime.snapshots import Snapshot

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


def test_actors_may_act_elsewhere_than_the_learner_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def placed(**options: str) -> tuple[str, str]:
        acting, learning = placement(replace(resolve({**OPTIONS, "runtime": "local"}).training, **options))  # type: ignore[arg-type]
        return str(acting), str(learning)

    assert placed(device="auto") == ("cuda:0", "cuda:0")
    assert placed(device="cuda:1") == ("cuda:1", "cuda:1")
    assert placed(device="cuda:1", actor_device="cpu") == ("cpu", "cuda:1")
    assert placed(device="auto", actor_device="cuda:1") == ("cuda:1", "cuda:0")
    with pytest.raises(UserError, match="--actor-device cuda:2: this machine has 2 CUDA devices"):
        placed(actor_device="cuda:2")
    with pytest.raises(UserError, match="--actor-device cuda: a serial run acts with the very agent that learns"):
        placed(runtime="serial", device="cpu", actor_device="cuda")
    assert placed(runtime="serial", device="cpu", actor_device="cpu") == ("cpu", "cpu")


def test_a_gpu_learns_a_whole_batch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({**OPTIONS, "runtime": "local", "num_envs": 8})
    pool = config.make_pool(1, 0)
    pool.close()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_gpu = replace(config, training=replace(config.training, device="cuda"))
    assert choose_group_size(on_gpu, pool) == 4
    assert make_layout(on_gpu).workers == 1
    chosen = replace(on_gpu, training=replace(on_gpu.training, group_size=2, workers=3))
    assert (choose_group_size(chosen, pool), make_layout(chosen).workers) == (2, 3)


def test_weights_are_published_where_the_actors_are() -> None:
    agent = torch.nn.Linear(2, 2)
    assert {tensor.device.type for tensor in Snapshot.of(agent, 0, META).tensors} == {"meta"}
    here = Snapshot.of(agent, 0)
    assert all(a is not b and a.equal(b) for a, b in zip(here.tensors, agent.parameters(), strict=True))


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
