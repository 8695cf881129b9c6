"""Fast-weight memories: the layers against a slow statement of them, sizes as published, gradients that reach every matrix."""

import numpy as np
import pytest
import torch

from bestiary.agents.memories import MEMORIES
from bestiary.agents.memories.fast_weights import SRWM, Delta, FakeSR, SRDelta, SRWMNoCarry
from bestiary.resolve import resolve

D, T, B = 6, 7, 3
SMALL = {"hidden": 8, "layers": 2, "heads": 2, "ff": 12}
FAST = {"delta": Delta, "srwm": SRWM, "sr-delta": SRDelta, "fake-sr": FakeSR, "srwm-no-carry": SRWMNoCarry}


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


def layer_norm(x, layer):
    weight, bias = (p.detach().numpy() for p in (layer.weight, layer.bias))
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weight + bias


def linear(x, layer):
    y = layer.weight.detach().numpy() @ x
    return y if layer.bias is None else y + layer.bias.detach().numpy()


def slow(memory, kind, x, done):
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
                        heads.append(delta(fast, (layer, head), made, elu, E))
                    elif kind == "fake-sr":
                        heads.append(h[own] @ mixer.weight[head].detach().numpy())
                    else:
                        y = self_referential(fast, (layer, head), softmax(h[own]), mixer.matrix, head)
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


@pytest.mark.parametrize("kind", ["delta", "srwm", "sr-delta", "fake-sr"])
def test_layers_against_a_slow_statement(kind):
    memory = make(FAST[kind])
    x, done = torch.randn(T, B, D, dtype=torch.float64), torch.rand(T, B) < 0.3
    y, _ = memory(x, done, memory.initial_state(B))
    np.testing.assert_allclose(y.detach().numpy(), slow(memory, kind, x.numpy(), done.numpy()), atol=1e-9)


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


@pytest.mark.parametrize("truncate", [False, True])
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
            assert (matrix.grad.abs().max() == 0) == truncate


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
    assert state[-1].tolist() == [2.0] * B  # two steps into the third unroll
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
    from bestiary.errors import UserError

    with pytest.raises(UserError) as caught:
        resolve({"env": "toy/recall", "memory": name, "memory.heads": 7})
    said = "--memory.heads 7 x head size 18 is not --memory.hidden 128; try --memory.heads 8"
    assert list(caught.value.problems) == [said]


def test_they_are_all_on_the_list():
    assert set(FAST) < set(MEMORIES)


@pytest.mark.parametrize("features", ["elu", "softmax", "silu"])
def test_features_of_keys(features):
    memory = make(Delta, features=features)
    y, _ = memory(
        torch.randn(T, B, D, dtype=torch.float64), torch.zeros(T, B, dtype=torch.bool), memory.initial_state(B)
    )
    assert torch.isfinite(y).all()
