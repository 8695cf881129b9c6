"""Names of environments in other projects."""

import pytest

from bestiary.envs import lookup_env
from bestiary.envs.original_names import bestiary_names
from bestiary.utils.errors import UserError


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        ("PongNoFrameskip-v4", ("atari/Pong",)),
        ("ALE/Pong-v5", ("atari/Pong",)),
        ("BreakoutDeterministic-v0", ("atari/Breakout",)),
        ("RiverraidNoFrameskip-v4", ("atari/Riverraid",)),
        ("UpNDown-v5", ("atari/UpNDown",)),
        ("procgen:procgen-starpilot-v0", ("procgen/starpilot",)),
        ("procgen-maze-v0", ("procgen/maze",)),
        ("StarpilotEasy-v0", ("procgen/starpilot:easy",)),
        ("AirRaidNoFrameskip-v4,PongNoFrameskip-v4", ("atari/AirRaid", "atari/Pong")),
        ("CartPole-v1", ()),
        ("Pong", ()),
        ("NoGameNoFrameskip-v4", ()),
        ("procgen:procgen-pong-v0", ()),
        ("PongNoFrameskip-v4,Nonsense-v4", ()),
    ],
)
def test_original_names(original: str, expected: tuple[str, ...]) -> None:
    assert bestiary_names(original) == expected
    for name in expected:
        lookup_env(name)


def test_an_original_name_is_refused_with_a_hint() -> None:
    with pytest.raises(UserError, match="in Bestiary, write atari/AirRaid atari/Pong"):
        lookup_env("AirRaidNoFrameskip-v4,PongNoFrameskip-v4")
