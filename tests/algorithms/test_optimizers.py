"""Tests of the optimizers: results equal PyTorch's bit for bit or TensorFlow's formula; no import of the compiler."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bestiary.algorithms.base import MAIN_OPTIMIZER
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.optimizers import Adam, RMSprop, RMSpropTF

PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    (Adam, torch.optim.Adam, {"fused": True}),
    (Adam, torch.optim.Adam, {"maximize": True}),
    (RMSprop, torch.optim.RMSprop, {"momentum": 0.5}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS)
def test_parameters_and_state_equal_pytorch(ours: Any, theirs: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first = nn.Linear(5, 3)
    second = nn.Linear(5, 3)
    second.load_state_dict(first.state_dict())
    optimizers = [kind(net.parameters(), lr=0.1, **settings) for kind, net in ((ours, first), (theirs, second))]
    for step in range(6):
        inputs = torch.randn(7, 5)
        for net, optimizer in zip((first, second), optimizers, strict=True):
            net(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in net.parameters())
        if step == 2:  # the states are interchangeable
            states = [optimizer.state_dict() for optimizer in optimizers]
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.load_state_dict(state)
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_tf_equals_the_formula_of_tensorflow(momentum: float) -> None:
    """The accumulator starts at 1, epsilon is inside the root, and the momentum accumulates lr * g / root."""
    rng = np.random.default_rng(0)
    weights = [nn.Parameter(torch.tensor(rng.normal(size=shape))) for shape in ((4, 3), (2,))]
    optimizer = RMSpropTF(weights, lr=0.1, alpha=0.9, eps=0.01, momentum=momentum)
    expected = [weight.detach().numpy().copy() for weight in weights]
    squares = [np.ones_like(w) for w in expected]
    moments = [np.zeros_like(w) for w in expected]
    for step in range(7):
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (1 + step)
        for k, weight in enumerate(weights):
            gradient = 10.0 ** -(step % 4) * rng.normal(size=weight.shape)
            weight.grad = torch.tensor(gradient)
            squares[k] = 0.9 * squares[k] + 0.1 * gradient**2
            moments[k] = momentum * moments[k] + lr * gradient / np.sqrt(squares[k] + 0.01)
            expected[k] = expected[k] - moments[k]
        optimizer.step()
        for weight, values in zip(weights, expected, strict=True):
            np.testing.assert_allclose(weight.detach().numpy(), values, rtol=1e-12)


def test_small_gradients_move_weights_less_than_with_pytorchs_rmsprop() -> None:
    """After many equal gradients g, the step is lr * g / sqrt(g^2 + eps) instead of lr * g / (|g| + eps)."""
    steps = {}
    for kind in ("rmsprop", "rmsprop_tf"):
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        algorithm = Impala(Impala.Options(optimizer=kind, lr=1.0, eps=0.01))
        optimizer = algorithm.make_optimizers([weight])[MAIN_OPTIMIZER]
        for _ in range(3000):
            before = weight.item()
            weight.grad = torch.full_like(weight, 1e-3)
            optimizer.step()
        steps[kind] = before - weight.item()
    assert steps["rmsprop"] == pytest.approx(1e-3 / (1e-3 + 0.01), rel=1e-6)
    assert steps["rmsprop_tf"] == pytest.approx(1e-3 / (1e-6 + 0.01) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_tf_continues_exactly_from_a_saved_state(momentum: float) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(10, 5)
    results = []
    for reload_at in (None, 4):
        weight = nn.Parameter(torch.ones(5))
        optimizer = RMSpropTF([weight], lr=0.1, eps=0.01, momentum=momentum)
        for step, gradient in enumerate(gradients):
            if step == reload_at:
                state = optimizer.state_dict()
                optimizer = RMSpropTF([weight], lr=0.1, eps=0.01, momentum=momentum)
                optimizer.load_state_dict(state)
            weight.grad = gradient.clone()
            optimizer.step()
        results.append(weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("algorithm", ["impala", "ppo"])
def test_training_does_not_import_the_compiler(algorithm: str, tmp_path: Path) -> None:
    script = f"""
import sys
from bestiary.cli.main import run_command
status = run_command("train toy/catch --algo {algorithm} --memory lstm --steps 3k --run-dir r".split())
sys.exit(status or ("torch._dynamo" in sys.modules and "torch._dynamo was imported"))
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
