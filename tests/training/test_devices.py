"""Choice of devices, device placement of tensors and mixed precision, tested without a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from bestiary.algorithms.base import MAIN_OPTIMIZER, Batch
from bestiary.config.resolve import resolve
from bestiary.training.devices import choose_device, choose_devices
from bestiary.training.factory import make_actors_and_learner, make_thread_layout
from bestiary.training.learner import Learner
from bestiary.training.micro_batch_tuning import choose_micro_batch_size
from bestiary.training.weights import Weights
from bestiary.utils.errors import UserError

META = torch.device("meta")
OPTIONS = {
    "env": "atari/Pong",
    "runtime": "serial",
    "num_envs": 4,
    "batch_size": 4,
    "rollout_length": 3,
    "device": "cpu",
}


def test_device_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for invalid in ("gpu", "cuda:x", "vulkan", ""):
        with pytest.raises(UserError, match="expected auto, cpu, cuda"):
            choose_device(invalid)


def test_actors_and_learner_may_have_different_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def devices(**options: str) -> tuple[str, str]:
        training = resolve({**OPTIONS, "runtime": "local"}).training
        actor, learner = choose_devices(replace(training, **options))  # type: ignore[arg-type]
        return str(actor), str(learner)

    assert devices(device="auto") == ("cuda:0", "cuda:0")
    assert devices(device="cuda:1") == ("cuda:1", "cuda:1")
    assert devices(device="cuda:1", actor_device="cpu") == ("cpu", "cuda:1")
    assert devices(device="auto", actor_device="cuda:1") == ("cuda:1", "cuda:0")
    with pytest.raises(UserError, match="--actor-device cuda:2: this machine has 2 CUDA devices"):
        devices(actor_device="cuda:2")
    with pytest.raises(UserError, match="--actor-device cuda: a serial run has one agent"):
        devices(runtime="serial", device="cpu", actor_device="cuda")
    assert devices(runtime="serial", device="cpu", actor_device="cpu") == ("cpu", "cpu")


def test_on_a_gpu_a_micro_batch_is_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({**OPTIONS, "runtime": "local", "num_envs": 8})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_gpu = replace(config, training=replace(config.training, device="cuda"))
    assert choose_micro_batch_size(on_gpu) == 4
    assert make_thread_layout(on_gpu).learner_threads == 1
    explicit = replace(on_gpu, training=replace(on_gpu.training, micro_batch_size=2, learner_threads=3))
    assert (choose_micro_batch_size(explicit), make_thread_layout(explicit).learner_threads) == (2, 3)


def test_weights_are_copied_to_the_device_of_the_actors() -> None:
    agent = torch.nn.Linear(2, 2)
    assert {tensor.device.type for tensor in Weights.from_agent(agent, 0, META).tensors} == {"meta"}
    copied = Weights.from_agent(agent, 0)
    assert all(a is not b and a.equal(b) for a, b in zip(copied.tensors, agent.parameters(), strict=True))


@pytest.mark.parametrize("torso", ["shallow", "resnet", "mlp"])
def test_update_keeps_all_tensors_on_the_device_of_the_learner(torso: str) -> None:
    """Tensors of the meta device have shapes but no values; an operation fails if one of its tensors is on the CPU."""
    (actor,), learner = make_actors_and_learner(resolve({**OPTIONS, "torso": torso}))
    actor.start()
    rollout = actor.collect().to(META)
    actor.pool.close()
    moved = Learner(learner.agent.to(META), learner.algorithm, 1000, micro_batch_size=2, device=META)
    gradient = moved.batch_gradient(Batch(rollout, moved.algorithm.loss))
    norm = torch.nn.utils.get_total_norm(gradient.tensors)
    moved.optimizers[MAIN_OPTIMIZER].step(gradient.tensors, norm, max_norm=40.0, lr=1e-3)
    everything = [*gradient.tensors, *gradient.sums.values(), *moved.parameters, *moved.save()["optimizer"].values()]
    assert {tensor.device.type for tensor in everything if tensor.ndim} == {"meta"}
    assert [g.shape for g in gradient.tensors] == [p.shape for p in moved.parameters]


def test_bfloat16_is_used_only_inside_the_network() -> None:
    (actor,), learner = make_actors_and_learner(resolve({**OPTIONS, "precision": "bfloat16"}))
    dtypes = []
    policy: torch.nn.Module = learner.agent.policy  # type: ignore[attr-defined]
    policy.register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    actor.start()
    rollout = actor.collect()
    (metrics,) = learner.learn([rollout])
    actor.pool.close()
    assert set(dtypes) == {torch.bfloat16}
    assert rollout.log_prob.dtype == rollout.value.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in learner.parameters)
    assert all(math.isfinite(value) for value in metrics.values())


def test_bfloat16_gradient_is_close_to_float32() -> None:
    (actor,), learner = make_actors_and_learner(resolve(OPTIONS))
    actor.start()
    rollout = actor.collect()
    actor.pool.close()
    float32 = learner.batch_gradient(Batch(rollout, learner.algorithm.loss)).tensors
    learner.precision = "bfloat16"
    bfloat16 = learner.batch_gradient(Batch(rollout, learner.algorithm.loss)).tensors
    a, b = torch.cat([g.flatten() for g in float32]), torch.cat([g.flatten() for g in bfloat16])
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.98
