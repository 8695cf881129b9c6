"""Optimizers are PyTorch's own, bit for bit, and leave its compiler where it is."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bestiary.algorithms.optimizers import Adam, RMSprop

PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    (Adam, torch.optim.Adam, {"fused": True}),
    (Adam, torch.optim.Adam, {"maximize": True}),
    (RMSprop, torch.optim.RMSprop, {"momentum": 0.5}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS)
def test_they_compute_and_remember_what_pytorchs_do(ours: Any, theirs: Any, settings: dict[str, Any]) -> None:
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
        if step == 2:  # and what they remember is interchangeable
            states = [optimizer.state_dict() for optimizer in optimizers]
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.load_state_dict(state)
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["impala", "ppo"])
def test_a_training_does_not_import_the_compiler(algorithm: str, tmp_path: Path) -> None:
    script = f"""
import sys
from bestiary.cli import run_command
status = run_command("train toy/catch --algo {algorithm} --memory lstm --steps 3k --run-dir r".split())
sys.exit(status or ("torch._dynamo" in sys.modules and "the compiler was imported"))
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
