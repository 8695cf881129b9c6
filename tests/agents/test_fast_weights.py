"""Fast-weight memories: the layers against a slow statement of them, sizes as published, gradients that reach every matrix."""

import itertools
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents.memories import MEMORIES
from bestiary.agents.memories.fast_weights import SRWM, Delta, FakeSR, SRDelta, SRWMNoCarry
from bestiary.analysis.play import play as play_on
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.runtime.build import build
from bestiary.runtime.devices import check_device
from bestiary.runtime.serial import play

pytestmark = pytest.mark.xdist_group("float64")  # compiled for the tests alone, and by one process
D, T, B = 6, 7, 3
SMALL: dict[str, Any] = {"hidden": 8, "layers": 2, "heads": 2, "ff": 12}
FAST: dict[str, Any] = {
    "delta": Delta,
    "srwm": SRWM,
    "sr-delta": SRDelta,
    "fake-sr": FakeSR,
    "srwm-no-carry": SRWMNoCarry,
}


def make(part, seed: int = 0, **options):
    torch.manual_seed(seed)
    return part(D, part.Options(**{**SMALL, **options})).double()


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


SLOW_FEATURES = {"elu": elu, "softmax": softmax, "silu": silu}


def layer_norm(x, layer):
    weight, bias = (p.detach().numpy() for p in (layer.weight, layer.bias))
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weight + bias


def linear(x, layer):
    y = layer.weight.detach().numpy() @ x
    return y if layer.bias is None else y + layer.bias.detach().numpy()


def slow(memory, kind, x, done, features="elu", softmaxed=True, norm=False):
    """[T,B,D] -> [T,B,hidden], one environment, one step, one head at a time."""
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
                    if kind == "delta":
                        made = linear(layer_norm(h, mixer.norm), mixer.slow).reshape(H, 3 * E + 1)[head]
                        heads.append(delta(fast, (layer, head), made, SLOW_FEATURES[features], E))
                        continue
                    seen = (layer_norm(h, mixer.norm) if norm else h)[own]
                    seen = softmax(seen) if softmaxed else seen
                    if kind == "fake-sr":
                        heads.append(seen @ mixer.weight[head].detach().numpy())
                    else:
                        y = self_referential(fast, (layer, head), seen, mixer.matrix, head)
                        heads.append(delta(fast, (layer, head, "d"), y, softmax, E) if kind == "sr-delta" else y)
                h = h + linear(np.concatenate(heads), mixer.project)
                inner = np.maximum(linear(layer_norm(h, feedforward.norm), feedforward.layers[0]), 0)
                h = h + linear(inner, feedforward.layers[2])
            out[t, b] = h
    return out


def delta(fast, key, made, feature, E):
    q, k, v, rate = feature(made[:E]), feature(made[E : 2 * E]), made[2 * E : 3 * E], sigmoid(made[3 * E])
    w = fast.setdefault(key, np.zeros((E, E)))
    fast[key] = w + np.outer(k, rate * (v - k @ w))
    return q @ fast[key]


def self_referential(fast, key, x, matrix, head):
    w = fast.setdefault(key, [base[head].detach().numpy().copy() for base in matrix.base])
    y, q, k, b = x @ w[0], softmax(x @ w[1]), softmax(x @ w[2]), sigmoid(x @ w[3])
    fast[key] = [part + b[i] * np.outer(k, (q - k) @ part) for i, part in enumerate(w)]
    return y


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("delta", {"features": "elu"}),
        ("delta", {"features": "softmax"}),
        ("delta", {"features": "silu"}),
        ("srwm", {"softmax": True}),
        ("srwm", {"softmax": False, "norm": True}),
        ("sr-delta", {"softmax": True}),
        ("sr-delta", {"softmax": False, "norm": True}),
        ("fake-sr", {"softmax": True}),
        ("fake-sr", {"softmax": False}),
    ],
    ids=str,
)
def test_layers_against_a_slow_statement(kind, options):
    memory = make(FAST[kind], **options)
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.rand(T, B) < 0.3
    y, _ = memory(x, done, memory.initial_state(B))
    if "softmax" in options:
        options = {"softmaxed": options["softmax"], "norm": options.get("norm", False)}
    expected = slow(memory, kind, x.numpy(), done.numpy(), **options)
    np.testing.assert_allclose(y.detach().numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("name", ["srwm", "sr-delta", "fake-sr"])
def test_first_weights_as_published(name):
    """Of mean zero and deviation 1 / sqrt(E); the rates' of the mean that is asked for."""
    memory = make(FAST[name], hidden=256, heads=4, layers=1)
    mixer = memory.mixers[0]
    for weights in [mixer.weight] if name == "fake-sr" else mixer.matrix.base:
        assert weights.mean().item() == pytest.approx(0, abs=0.02)
        assert weights.std().item() == pytest.approx(1 / 8, rel=0.1)
    if name != "fake-sr":
        *same, rates = make(FAST[name], hidden=256, heads=4, layers=1, rate=-1.0).mixers[0].matrix.base
        torch.testing.assert_close(rates, mixer.matrix.base[3] - 1)
        assert all(torch.equal(a, b) for a, b in zip(same, mixer.matrix.base, strict=False))


PUBLISHED = {"srwm": 967_760, "fake-sr": 958_544, "sr-delta": 976_208, "delta": 1_054_800}
UNUSED = {"delta": 0}  # the others' published counts have a norm of 256 parameters a layer that is never used
STATE = {"srwm": 13_312, "delta": 4_096, "sr-delta": 25_856, "fake-sr": 0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_as_published(name):
    config = resolve({"env": "procgen/starpilot:easy", "torso": "resnet", "torso.center": "off", "memory": name})
    pool = config.make_pool(1, 0)
    agent = config.make_agent(pool)
    pool.close()
    count = sum(parameter.numel() for parameter in agent.parameters())
    assert count + UNUSED.get(name, 2 * 256) == PUBLISHED[name]
    assert sum(s[0].numel() for s in agent.initial_state(5)) == STATE[name]


@pytest.mark.parametrize("truncate", ["none", "step"])
@pytest.mark.parametrize("kind", ["srwm", "sr-delta"])
def test_gradients_reach_every_matrix_unless_cut_after_each_step(kind, truncate):
    """The published code cut them, so that three of the four matrices of an SRWM never learnt."""
    memory = make(FAST[kind], truncate=truncate)
    y, _ = memory(
        torch.randn(T, B, D, dtype=torch.float64), torch.zeros(T, B, dtype=torch.bool), memory.initial_state(B)
    )
    y.square().sum().backward()
    for mixer in memory.mixers:
        made, *rest = mixer.matrix.base
        assert made.grad.abs().max() > 0
        for matrix in rest:
            assert (matrix.grad.abs().max() == 0) == (truncate == "step")


def test_no_carry_begins_anew_with_every_unroll():
    memory, plain = make(SRWMNoCarry, span=3), make(SRWM)
    plain.load_state_dict(memory.inner.state_dict())
    x = torch.randn(8, B, D, dtype=torch.float64)
    done = torch.zeros(8, B, dtype=torch.bool)
    done[4, 1] = True
    y, state = memory(x, done, memory.initial_state(B))
    resets = done.clone()
    resets[[0, 3, 6]] = True
    expected, _ = plain(x, resets, plain.initial_state(B))
    torch.testing.assert_close(y, expected)
    assert state[-1].tolist() == [2] * B  # two steps into the third unroll
    again, state = [], memory.initial_state(B)
    for t in range(8):  # an actor goes a step at a time
        one, state = memory(x[t : t + 1], done[t : t + 1], state)
        again.append(one)
    torch.testing.assert_close(torch.cat(again), y)


def test_the_span_is_the_unroll():
    config = resolve({"env": "toy/recall", "memory": "srwm-no-carry", "unroll_length": 13})
    assert config.parts["memory"].options.span == 13
    config = resolve({"env": "toy/recall", "memory": "srwm-no-carry", "algo": "ppo", "algo.sequence": 8})
    assert config.parts["memory"].options.span == 8


@pytest.mark.parametrize("name", FAST)
def test_heads_must_fit(name):
    with pytest.raises(UserError) as caught:
        resolve({"env": "toy/recall", "memory": name, "memory.heads": 7})
    said = "--memory.heads 7 x head size 18 is not --memory.hidden 128; try --memory.heads 8"
    assert list(caught.value.problems) == [said]


def test_they_are_all_on_the_list():
    assert set(FAST) < set(MEMORIES)


# --- what a learner sees of them ---

TOLD = {
    "delta": {"delta_norm", "delta_beta"},
    "srwm": {"shift_norm", "shift_beta"},
    "srwm-no-carry": {"shift_norm", "shift_beta"},
    "sr-delta": {"shift_norm", "shift_beta", "delta_norm", "delta_beta"},
    "fake-sr": set(),
}


def learn(name, spoil=None, **options):
    """One update on toy/recall: the learner, what it reports, and the weights before."""
    small = {f"memory.{key}": value for key, value in SMALL.items()}
    config = resolve(
        {
            **{"env": "toy/recall", "memory": name, "runtime": "serial", "num_envs": 4, "batch_size": 4},
            **{"unroll_length": 6, "steps": 48, **small, **options},
        }
    )
    (actor,), learner = build(config)
    actor.start()
    rollouts = play(actor, learner)
    if spoil is not None:
        spoil(rollouts[0])
    agent: Any = learner.agent
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    (metrics,) = learner.learn(rollouts)
    return learner, metrics, before


@pytest.mark.parametrize("name", FAST)
def test_they_tell_how_large_they_are_and_how_strongly_they_are_written_to(name):
    _, metrics, _ = learn(name)
    assert {key for key in metrics if key.endswith(("_norm", "_beta"))} - {"grad_norm"} == TOLD[name]
    assert all(0 < metrics[key] < (1 if key.endswith("beta") else math.inf) for key in TOLD[name])
    _, in_groups, _ = learn(name, group_size=1)
    for key in TOLD[name]:
        assert in_groups[key] == pytest.approx(metrics[key], rel=1e-5)


@torch.no_grad()
def test_what_they_tell_by_hand():
    memory = make(SRWM, layers=1)
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.rand(T, B) < 0.3
    y, state, told = memory.watch(x, done, memory.initial_state(B))
    torch.testing.assert_close((y, state), memory(x, done, memory.initial_state(B)))
    norms = [math.sqrt(sum(part[b, h].square().sum().item() for part in state)) for b in range(B) for h in range(2)]
    assert told["shift_norm"].item() == pytest.approx(np.mean(norms))
    seen = memory.input(x[-1]).unflatten(-1, (2, 4)).softmax(-1)  # [B,H,E]
    weights = memory.mixers[0].matrix.base[3] + state[3]
    rates = [sigmoid(seen[b, h].numpy() @ weights[b, h].numpy()) for b in range(B) for h in range(2)]
    assert told["shift_beta"].item() == pytest.approx(np.mean(rates), rel=1e-6)
    memory = make(Delta, layers=1)
    _, (matrix,), told = memory.watch(x, done, memory.initial_state(B))
    assert told["delta_norm"].item() == pytest.approx(matrix.flatten(2).norm(dim=-1).mean().item())
    mixer = memory.mixers[0]
    rates = mixer.slow(mixer.norm(memory.input(x))).unflatten(-1, (2, 13))[..., -1].sigmoid()
    assert told["delta_beta"].item() == pytest.approx(rates.mean().item(), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e30])
@pytest.mark.parametrize("name", ["delta", "srwm", "sr-delta"])
def test_an_update_whose_matrices_are_not_finite_is_left_out(name, value):
    """Even where the loss still is: a square of 1e30 has no place in float32, and tells of what comes next."""

    def spoil(rollout):
        rollout.done[:] = False
        rollout.state[0].fill_(value)

    learner, metrics, before = learn(name, spoil)
    assert not all(map(math.isfinite, metrics.values()))
    assert all(torch.equal(before[n], p) for n, p in learner.agent.named_parameters())
    assert (learner.version, learner.skipped) == (0, 1)


@pytest.mark.parametrize("name", FAST)
def test_nothing_waits_for_the_device(name):
    """Tensors on `meta` have no values: whatever asks for one, to decide something on the host, fails."""
    memory = FAST[name](D).to("meta")
    x, done = torch.zeros(T, B, D, device="meta"), torch.zeros(T, B, dtype=torch.bool, device="meta")
    y, state, told = memory.watch(x, done, memory.initial_state(B))
    torch.autograd.grad(y.sum() + sum(told.values()), list(memory.parameters()), allow_unused=True)
    assert y.shape == (T, B, memory.output_size)
    assert [s.shape for s in state] == [s.shape for s in memory.initial_state(B)]


@pytest.mark.parametrize(("truncate", "changed"), [("none", [True] * 4), ("step", [True, False, False, False])])
@pytest.mark.parametrize("name", ["srwm", "sr-delta"])
def test_all_four_matrices_change_in_one_update(name, truncate, changed):
    """With the real learner, from an unroll of several steps; with the published gradient only the first does."""
    learner, _, before = learn(name, **{"memory.truncate": truncate})
    for layer in range(2):
        names = [f"memory.mixers.{layer}.matrix.base.{part}" for part in range(4)]
        assert [not torch.equal(before[n], learner.agent.get_parameter(n)) for n in names] == changed


def test_a_training_without_numba_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "bestiary.kernels.cpu", raising=False)
    with pytest.raises(UserError) as caught:
        check_device(resolve({"env": "toy/recall", "memory": "srwm"}))
    assert str(caught.value) == (
        "--memory.kernel auto: numba is not installed: pip install numba, or choose reference, which is slow"
    )
    check_device(resolve({"env": "toy/recall", "memory": "srwm", "memory.kernel": "reference"}))


def test_an_agent_of_a_gpu_plays_on_a_cpu():
    memory, same = make(SRWM, kernel="triton"), make(SRWM)
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.zeros(T, B, dtype=torch.bool)
    torch.testing.assert_close(memory(x, done, memory.initial_state(B)), same(x, done, same.initial_state(B)))


def test_an_evaluation_that_does_not_carry_plays_as_no_carry_does():
    def values(name, carry):
        config = resolve({"env": "toy/recall", "memory": name, "unroll_length": 5, "delay": 20})
        pool = config.make_pool(3, seed=1)
        agent = config.make_agent(pool, seed=2)  # the same weights
        with torch.no_grad():
            moments = play_on(agent, pool, greedy=False, seed=3, carry=carry)
            played = torch.cat([output.value for _, output in itertools.islice(moments, 17)])
        pool.close()
        return played

    without = values("srwm-no-carry", None)
    assert torch.equal(values("srwm", carry=5), without)
    assert not torch.equal(values("srwm", carry=None), without)


def test_from_the_training_to_the_evaluation():
    run = bestiary.train(
        "toy/recall", run_dir="run", memory="srwm-no-carry", steps=600, unroll_length=7, runtime="serial", log_every=200,
        **{f"memory.{key}": value for key, value in SMALL.items()},
    )  # fmt: skip
    assert (run.metrics["shift_norm"] > 0).all()
    assert (np.abs(run.metrics["shift_beta"] - 0.5) < 0.5).all()
    again = bestiary.load("run")
    agent: Any = again.agent()
    assert agent.memory.span == 7
    evaluation = again.evaluate(episodes=3, carry=0)
    assert json.loads(evaluation.path.read_text())["protocol"]["memory_carried_for"] == 7
