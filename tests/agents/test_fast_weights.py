"""Tests of fast-weight memories: layers against a slow implementation, published sizes, gradients, metrics, resets."""

import itertools
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents.memories import (
    MEMORIES,
    SRWM,
    DeltaDelta,
    DeltaNet,
    DeltaRNN,
    FakeSR,
    LinearTransformer,
    RecurrentDelta,
    SRDelta,
    SRWMNoCarry,
)
from bestiary.agents.policy_runner import run_policy
from bestiary.config.resolve import resolve
from bestiary.kernels import sum_seq
from bestiary.training.devices import check_devices
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts
from bestiary.utils.errors import UserError

pytestmark = pytest.mark.xdist_group("float64")  # float64 kernels are compiled only for tests: in one process
D, T, B = 6, 7, 3
SMALL: dict[str, Any] = {"hidden": 8, "layers": 2, "heads": 2, "ff": 12}
FAST: dict[str, Any] = {
    "delta": DeltaNet,
    "srwm": SRWM,
    "sr-delta": SRDelta,
    "fake-sr": FakeSR,
    "srwm-no-carry": SRWMNoCarry,
    "linear-transformer": LinearTransformer,
    "recurrent-delta": RecurrentDelta,
    "delta-rnn": DeltaRNN,
    "delta-delta": DeltaDelta,
}


def make_memory(kind, seed: int = 0, **options):
    torch.manual_seed(seed)
    return kind(D, kind.Options(**{**SMALL, **options})).double()


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def elu(x):
    y = np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1) + 1
    return y / (y.sum(-1, keepdims=True) + 1e-5)


def silu(x):
    y = x * sigmoid(x)
    return y / np.sqrt((y**2).sum(-1, keepdims=True))


FEATURE_MAPS = {"elu": elu, "softmax": softmax, "silu": silu}


def layer_norm(x, layer):
    weight, bias = (p.detach().numpy() for p in (layer.weight, layer.bias))
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weight + bias


def linear(x, layer):
    y = layer.weight.detach().numpy() @ x
    return y if layer.bias is None else y + layer.bias.detach().numpy()


def slow_forward(memory, kind, x, done, feature_map="elu", softmaxed=True, norm=False):
    """[T,B,D] -> [T,B,hidden], one environment, step and head at a time."""
    H, E = 2, 4
    out = np.zeros((len(x), x.shape[1], 8))
    for b in range(x.shape[1]):
        fast: dict = {}
        for t in range(len(x)):
            if done[t, b]:
                fast = {}
            h = linear(x[t, b], memory.input)
            for layer, (mixer, feedforward) in enumerate(zip(memory.mixers, memory.feedforwards, strict=True)):
                heads = []
                for head in range(H):
                    own = slice(head * E, (head + 1) * E)
                    if kind in VARIANTS:
                        columns = linear(layer_norm(h, mixer.norm), mixer.slow).reshape(H, -1)[head]
                        key, phi = (layer, head), FEATURE_MAPS[feature_map]
                        heads.append(VARIANTS[kind](fast, key, columns, phi, E, mixer, head))
                        continue
                    head_input = (layer_norm(h, mixer.norm) if norm else h)[own]
                    head_input = softmax(head_input) if softmaxed else head_input
                    if kind == "fake-sr":
                        heads.append(head_input @ mixer.weight[head].detach().numpy())
                    else:
                        y = self_referential(fast, (layer, head), head_input, mixer.matrix, head)
                        heads.append(delta(fast, (layer, head, "d"), y, softmax, E) if kind == "sr-delta" else y)
                h = h + linear(np.concatenate(heads), mixer.project)
                inner = np.maximum(linear(layer_norm(h, feedforward.norm), feedforward.layers[0]), 0)
                h = h + linear(inner, feedforward.layers[2])
            out[t, b] = h
    return out


def delta(fast, key, qkvb, feature_map, E, *_):
    q, k = feature_map(qkvb[:E]), feature_map(qkvb[E : 2 * E])
    v, beta = qkvb[2 * E : -1], sigmoid(qkvb[-1])
    w = fast.setdefault(key, np.zeros((E, len(v))))
    fast[key] = w + np.outer(k, beta * (v - k @ w))
    return q @ fast[key]


def linear_transformer(fast, key, qkv, feature_map, E, *_):
    q, k, v = feature_map(qkv[:E]), feature_map(qkv[E : 2 * E]), qkv[2 * E :]
    fast[key] = fast.get(key, np.zeros((E, E))) + np.outer(k, v)
    return q @ fast[key]


def recurrent_delta(fast, key, qkvb, _, E, mixer, head):
    r = np.tanh(fast.get((*key, "out"), np.zeros(E)))
    change = [r @ matrix[head].detach().numpy() for matrix in mixer.recurrent]
    fast[(*key, "out")] = delta(fast, key, qkvb + np.concatenate(change), softmax, E)
    return fast[(*key, "out")]


def delta_rnn(fast, key, columns, _, E, *__):
    q, k, v, k2, v2 = (columns[i * E : (i + 1) * E] for i in range(5))
    z = delta(fast, (*key, "first"), np.concatenate([q, k, v, columns[5 * E : 5 * E + 1]]), softmax, E)
    w = fast.get((*key, "second"), np.zeros((E, E)))
    k2 = softmax(k2)
    w = w + np.outer(k2, sigmoid(columns[5 * E + 1]) * (v2 - k2 @ w))
    out = z + softmax(fast.get((*key, "out"), np.zeros(E))) @ w
    fast[(*key, "second")], fast[(*key, "out")] = w, out
    return out


def delta_delta(fast, key, columns, feature_map, E, *_):
    return delta(fast, (*key, "second"), delta(fast, (*key, "first"), columns, feature_map, E), feature_map, E)


VARIANTS = {
    "delta": delta,
    "linear-transformer": linear_transformer,
    "recurrent-delta": recurrent_delta,
    "delta-rnn": delta_rnn,
    "delta-delta": delta_delta,
}


def self_referential(fast, key, x, matrix, head):
    w = fast.setdefault(key, [base[head].detach().numpy().copy() for base in matrix.base])
    y, q, k, b = x @ w[0], softmax(x @ w[1]), softmax(x @ w[2]), sigmoid(x @ w[3])
    fast[key] = [block + b[i] * np.outer(k, (q - k) @ block) for i, block in enumerate(w)]
    return y


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("delta", {"feature_map": "elu"}),
        ("delta", {"feature_map": "softmax"}),
        ("delta", {"feature_map": "silu"}),
        ("linear-transformer", {"feature_map": "elu"}),
        ("linear-transformer", {"feature_map": "softmax"}),
        ("recurrent-delta", {}),
        ("delta-rnn", {}),
        ("delta-delta", {"feature_map": "elu"}),
        ("delta-delta", {"feature_map": "silu"}),
        ("srwm", {"softmax": True}),
        ("srwm", {"softmax": False, "norm": True}),
        ("sr-delta", {"softmax": True}),
        ("sr-delta", {"softmax": False, "norm": True}),
        ("fake-sr", {"softmax": True}),
        ("fake-sr", {"softmax": False}),
    ],
    ids=str,
)
def test_layers_equal_a_slow_implementation(kind, options):
    memory = make_memory(FAST[kind], **options)
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.rand(T, B) < 0.3
    y, _ = memory(x, done, memory.initial_state(B))
    if "softmax" in options:
        options = {"softmaxed": options["softmax"], "norm": options.get("norm", False)}
    expected = slow_forward(memory, kind, x.numpy(), done.numpy(), **options)
    np.testing.assert_allclose(y.detach().numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("name", ["srwm", "sr-delta", "fake-sr"])
def test_initial_weights_as_published(name):
    """Mean zero and standard deviation 1 / sqrt(E); the learning-rate columns have the mean `beta_init`."""
    memory = make_memory(FAST[name], hidden=256, heads=4, layers=1)
    mixer = memory.mixers[0]
    for weights in [mixer.weight] if name == "fake-sr" else mixer.matrix.base:
        assert weights.mean().item() == pytest.approx(0, abs=0.02)
        assert weights.std().item() == pytest.approx(1 / 8, rel=0.1)
    if name != "fake-sr":
        *same, betas = make_memory(FAST[name], hidden=256, heads=4, layers=1, beta_init=-1.0).mixers[0].matrix.base
        torch.testing.assert_close(betas, mixer.matrix.base[3] - 1)
        assert all(torch.equal(a, b) for a, b in zip(same, mixer.matrix.base, strict=False))


PUBLISHED = {
    "srwm": 967_760,
    "fake-sr": 958_544,
    "sr-delta": 976_208,
    "delta": 1_054_800,
    "linear-transformer": 1_052_752,
    "recurrent-delta": 1_054_800 + 2 * 8 * 16 * (3 * 16 + 1),  # per layer and head: maps from E to 3E + 1 numbers
    "delta-rnn": 1_054_800 + 2 * 8 * 128 * (2 * 16 + 1),  # per layer and head: 2E + 1 more columns of the linear layer
    "delta-delta": 1_054_800 + 2 * 8 * 128 * (2 * 16 + 1),
    "deep-ff": 921_168,
}
# The other published counts include an unused layer norm of 256 parameters per layer.
UNUSED = dict.fromkeys(("delta", "linear-transformer", "recurrent-delta", "delta-rnn", "delta-delta", "deep-ff"), 0)
STATE_SIZES = {
    "srwm": 13_312,
    "delta": 4_096,
    "sr-delta": 25_856,
    "fake-sr": 0,
    "linear-transformer": 4_096,
    "recurrent-delta": 4_352,
    "delta-rnn": 8_448,
    "delta-delta": 16_640,
    "deep-ff": 0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_as_published(name):
    config = resolve({"env": "procgen/starpilot:easy", "torso": "resnet", "torso.subtract_mean": "off", "memory": name})
    pool = config.make_vector_env(1, 0)
    agent = config.make_agent(pool)
    pool.close()
    count = sum(parameter.numel() for parameter in agent.parameters())
    assert count + UNUSED.get(name, 2 * 256) == PUBLISHED[name]
    assert sum(s[0].numel() for s in agent.initial_state(5)) == STATE_SIZES[name]


@pytest.mark.parametrize("truncate", ["none", "step"])
@pytest.mark.parametrize("kind", ["srwm", "sr-delta"])
def test_every_matrix_gets_a_gradient_unless_truncated(kind, truncate):
    """The published code truncated gradients after each step, so three of the four matrices were never trained."""
    memory = make_memory(FAST[kind], truncate=truncate)
    y, _ = memory(
        torch.randn(T, B, D, dtype=torch.float64), torch.zeros(T, B, dtype=torch.bool), memory.initial_state(B)
    )
    y.square().sum().backward()
    for mixer in memory.mixers:
        output, *rest = mixer.matrix.base
        assert output.grad.abs().max() > 0
        for matrix in rest:
            assert (matrix.grad.abs().max() == 0) == (truncate == "step")


@pytest.mark.parametrize("kind", ["linear-transformer", "recurrent-delta", "delta-rnn", "delta-delta"])
def test_truncated_gradients_stay_within_a_step(kind):
    """The output of a step depends on earlier inputs, but with `truncate` it has no gradient with respect to them.

    Without `truncate`, the gradients equal finite differences, also across the start of an episode.
    """
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.zeros(T, B, dtype=torch.bool)
    done[2, 1] = True
    for truncate in ("none", "step"):
        memory = make_memory(FAST[kind], truncate=truncate)
        state = tuple(0.3 * torch.randn_like(s) for s in memory.initial_state(B))
        inputs = x.clone().requires_grad_()
        y, _ = memory(inputs, done, state)
        (gradient,) = torch.autograd.grad(y[-1].sum(), inputs)
        assert gradient[-1].abs().max() > 0
        assert (gradient[:-1].abs().max() == 0) == (truncate == "step")
    memory = make_memory(FAST[kind])
    small = 1e-6
    inputs, states = x.clone().requires_grad_(), [s.clone().requires_grad_() for s in state]
    after = memory(inputs, done, tuple(states))
    weights = [torch.randn_like(tensor) for tensor in (after[0], *after[1])]
    loss = sum((w * tensor).sum() for w, tensor in zip(weights, (after[0], *after[1]), strict=True))
    tensors = [inputs, *states, *memory.parameters()]
    for tensor, gradient in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
        direction = torch.randn_like(tensor)
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                tensor.add_(direction, alpha=sign * small)
                out, new = memory(inputs, done, tuple(states))
                values.append(sum((w * t).sum() for w, t in zip(weights, (out, *new), strict=True)))
                tensor.add_(direction, alpha=-sign * small)
        slope = (values[0] - values[1]) / (2 * small)
        assert (gradient * direction).sum().item() == pytest.approx(slope.item(), rel=1e-4, abs=1e-6)


def test_sum_rule_over_several_chunks_equals_a_loop():
    q, k, v = (torch.randn(B, 2, 150, 4, dtype=torch.float64) for _ in range(3))
    state = torch.randn(B, 2, 4, 4, dtype=torch.float64)
    done = torch.rand(150, B) < 0.03
    assert 1 < done.sum() < 30
    out, after = sum_seq(q, k, v, done, state)
    for b, h in itertools.product(range(B), range(2)):
        w = state[b, h]
        for t in range(150):
            w = torch.zeros_like(w) if done[t, b] else w
            w = w + torch.outer(k[b, h, t], v[b, h, t])
            torch.testing.assert_close(out[b, h, t], q[b, h, t] @ w)
        torch.testing.assert_close(after[b, h], w)


def test_srwm_no_carry_resets_at_each_interval():
    memory = make_memory(SRWMNoCarry, reset_interval=3)
    srwm = make_memory(SRWM)
    srwm.load_state_dict(memory.inner.state_dict())
    x = torch.randn(8, B, D, dtype=torch.float64)
    done = torch.zeros(8, B, dtype=torch.bool)
    done[4, 1] = True
    y, state = memory(x, done, memory.initial_state(B))
    resets = done.clone()
    resets[[0, 3, 6]] = True
    expected, _ = srwm(x, resets, srwm.initial_state(B))
    torch.testing.assert_close(y, expected)
    assert state[-1].tolist() == [2] * B  # two steps into the third interval
    outputs, state = [], memory.initial_state(B)
    for t in range(8):
        output, state = memory(x[t : t + 1], done[t : t + 1], state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), y)


def test_reset_interval_defaults_to_the_sequence_length():
    config = resolve({"env": "toy/recall", "memory": "srwm-no-carry", "rollout_length": 13})
    assert config.components["memory"].options.reset_interval == 13
    config = resolve({"env": "toy/recall", "memory": "srwm-no-carry", "algo": "ppo", "algo.sequence_length": 8})
    assert config.components["memory"].options.reset_interval == 8


@pytest.mark.parametrize("name", FAST)
def test_sizes_that_do_not_fit_are_refused(name):
    with pytest.raises(UserError) as caught:
        resolve({"env": "toy/recall", "memory": name, "memory.heads": 7})
    (problem,) = caught.value.problems
    assert problem.startswith("--memory.heads 7 x head size 18")
    assert problem.endswith("--memory.hidden 128; try --memory.heads 8")


def test_all_are_registered():
    assert set(FAST) < set(MEMORIES)


# --- metrics and updates ---

METRICS = {
    "delta": {"delta_norm", "delta_beta"},
    "srwm": {"shift_norm", "shift_beta"},
    "srwm-no-carry": {"shift_norm", "shift_beta"},
    "sr-delta": {"shift_norm", "shift_beta", "delta_norm", "delta_beta"},
    "fake-sr": set(),
    "linear-transformer": {"sum_norm"},
    "recurrent-delta": {"delta_norm", "delta_beta"},
    "delta-rnn": {"delta_norm", "delta_beta"},
    "delta-delta": {"delta_norm", "delta_beta"},
}


def update_once(name, corrupt=None, **options):
    """Make one update on toy/recall. Return the learner, the metrics and the weights before the update."""
    small = {f"memory.{key}": value for key, value in SMALL.items()}
    config = resolve(
        {
            **{"env": "toy/recall", "memory": name, "runtime": "serial", "num_envs": 4, "batch_size": 4},
            **{"rollout_length": 6, "steps": 48, **small, **options},
        }
    )
    (actor,), learner = make_actors_and_learner(config)
    actor.start()
    rollouts = collect_rollouts(actor, learner)
    if corrupt is not None:
        corrupt(rollouts[0])
    agent: Any = learner.agent
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    (metrics,) = learner.learn(rollouts)
    return learner, metrics, before


@pytest.mark.parametrize("name", FAST)
def test_metrics_of_norms_and_learning_rates(name):
    _, metrics, _ = update_once(name)
    assert {key for key in metrics if key.endswith(("_norm", "_beta"))} - {"grad_norm"} == METRICS[name]
    assert all(0 < metrics[key] < (1 if key.endswith("beta") else math.inf) for key in METRICS[name])
    _, in_micro_batches, _ = update_once(name, micro_batch_size=1)
    for key in METRICS[name]:
        assert in_micro_batches[key] == pytest.approx(metrics[key], rel=1e-5)


@torch.no_grad()
def test_metrics_equal_their_definition():
    memory = make_memory(SRWM, layers=1)
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.rand(T, B) < 0.3
    y, state, metrics = memory.forward_with_metrics(x, done, memory.initial_state(B))
    torch.testing.assert_close((y, state), memory(x, done, memory.initial_state(B)))
    norms = [math.sqrt(sum(block[b, h].square().sum().item() for block in state)) for b in range(B) for h in range(2)]
    assert metrics["shift_norm"].item() == pytest.approx(np.mean(norms))
    head_inputs = memory.input(x[-1]).unflatten(-1, (2, 4)).softmax(-1)  # [B,H,E]
    weights = memory.mixers[0].matrix.base[3] + state[3]
    betas = [sigmoid(head_inputs[b, h].numpy() @ weights[b, h].numpy()) for b in range(B) for h in range(2)]
    assert metrics["shift_beta"].item() == pytest.approx(np.mean(betas), rel=1e-6)
    memory = make_memory(DeltaNet, layers=1)
    _, (matrix,), metrics = memory.forward_with_metrics(x, done, memory.initial_state(B))
    assert metrics["delta_norm"].item() == pytest.approx(matrix.flatten(2).norm(dim=-1).mean().item())
    mixer = memory.mixers[0]
    betas = mixer.slow(mixer.norm(memory.input(x))).unflatten(-1, (2, 13))[..., -1].sigmoid()
    assert metrics["delta_beta"].item() == pytest.approx(betas.mean().item(), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e30])
@pytest.mark.parametrize("name", ["delta", "srwm", "sr-delta", "linear-transformer", "recurrent-delta", "delta-rnn"])
def test_update_with_non_finite_norms_is_skipped(name, value):
    """The update is skipped even if the loss is finite: the square of 1e30 overflows float32."""

    def corrupt(rollout):
        rollout.done[:] = False
        rollout.state[0].fill_(value)

    learner, metrics, before = update_once(name, corrupt)
    assert not all(map(math.isfinite, metrics.values()))
    assert all(torch.equal(before[n], p) for n, p in learner.agent.named_parameters())
    assert (learner.version, learner.skipped_updates) == (0, 1)


@pytest.mark.parametrize("name", FAST)
def test_no_device_synchronisation(name):
    """Tensors on the `meta` device have no values, so any read of a value on the host would fail."""
    memory = FAST[name](D).to("meta")
    x, done = torch.zeros(T, B, D, device="meta"), torch.zeros(T, B, dtype=torch.bool, device="meta")
    y, state, metrics = memory.forward_with_metrics(x, done, memory.initial_state(B))
    torch.autograd.grad(y.sum() + sum(metrics.values()), list(memory.parameters()), allow_unused=True)
    assert y.shape == (T, B, memory.output_size)
    assert [s.shape for s in state] == [s.shape for s in memory.initial_state(B)]


@pytest.mark.parametrize(("truncate", "changed"), [("none", [True] * 4), ("step", [True, False, False, False])])
@pytest.mark.parametrize("name", ["srwm", "sr-delta"])
def test_all_four_matrices_change_in_one_update(name, truncate, changed):
    """With truncated gradients, as published, only the first matrix changes."""
    learner, _, before = update_once(name, **{"memory.truncate": truncate})
    for layer in range(2):
        names = [f"memory.mixers.{layer}.matrix.base.{block}" for block in range(4)]
        assert [not torch.equal(before[n], learner.agent.get_parameter(n)) for n in names] == changed


def test_training_without_numba_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    for module in ("numba_kernels", "numba_delta", "numba_srwm", "numba_simd"):
        monkeypatch.delitem(sys.modules, f"bestiary.kernels.{module}", raising=False)
    with pytest.raises(UserError) as caught:
        check_devices(resolve({"env": "toy/recall", "memory": "srwm"}))
    message = str(caught.value)
    assert message.startswith("--memory.kernel auto: numba is not installed")
    assert "pip install numba" in message
    assert "reference" in message
    check_devices(resolve({"env": "toy/recall", "memory": "srwm", "memory.kernel": "reference"}))


def test_agent_with_gpu_kernel_runs_on_a_cpu():
    memory, same = make_memory(SRWM, kernel="triton"), make_memory(SRWM)
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.zeros(T, B, dtype=torch.bool)
    torch.testing.assert_close(memory(x, done, memory.initial_state(B)), same(x, done, same.initial_state(B)))


def test_srwm_with_state_resets_in_evaluation_equals_srwm_no_carry():
    def values(name, reset_state_every):
        config = resolve({"env": "toy/recall", "memory": name, "rollout_length": 5, "delay": 20})
        pool = config.make_vector_env(3, seed=1)
        agent = config.make_agent(pool, seed=2)  # same weights for both memories
        with torch.no_grad():
            records = run_policy(agent, pool, greedy=False, seed=3, reset_state_every=reset_state_every)
            played = torch.cat([record.output.value for record, _ in itertools.islice(records, 17)])
        pool.close()
        return played

    no_carry = values("srwm-no-carry", None)
    assert torch.equal(values("srwm", reset_state_every=5), no_carry)
    assert not torch.equal(values("srwm", reset_state_every=None), no_carry)


def test_training_then_evaluation():
    run = bestiary.train(
        "toy/recall",
        run_dir="run",
        memory="srwm-no-carry",
        steps=600,
        rollout_length=7,
        runtime="serial",
        log_every=200,
        **{f"memory.{key}": value for key, value in SMALL.items()},
    )
    assert (run.metrics["shift_norm"] > 0).all()
    assert (np.abs(run.metrics["shift_beta"] - 0.5) < 0.5).all()
    again = bestiary.load("run")
    agent: Any = again.agent()
    assert agent.memory.reset_interval == 7
    evaluation = bestiary.evaluate(again, episodes=3, reset_state_every=0)
    assert evaluation.path is not None
    assert json.loads(evaluation.path.read_text())["protocol"]["reset_state_every"] == 7
