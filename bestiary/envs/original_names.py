"""Translation of environment names from Gym, EnvPool and TorchBeast (Atari and ProcGen games) to Bestiary names."""

import re
from functools import cache

from bestiary.envs.atari_games import list_games
from bestiary.envs.procgen import GAMES

# PongNoFrameskip-v4, PongDeterministic-v4, Pong-v0, ALE/Pong-v5, and Pong-v5 of EnvPool.
GYM_ATARI = re.compile(r"(?:ALE/)?(?P<game>[A-Za-z0-9]+?)(?:-ram)?(?:NoFrameskip|Deterministic)?-v\d+")
# procgen:procgen-starpilot-v0, procgen-starpilot-v0, and StarpilotEasy-v0 of EnvPool.
GYM_PROCGEN = re.compile(r"(?:procgen:|procgen_gym/)?procgen-(?P<game>[a-z]+)-v\d+")
ENVPOOL_PROCGEN = re.compile(r"(?P<game>[A-Za-z]+?)(?P<mode>Easy|Hard|Extreme|Memory|Exploration)-v0")
# Names of groups of games in the PopArt fork of TorchBeast.
SIX_GAMES = ("AirRaid", "Carnival", "DemonAttack", "NameThisGame", "Pong", "SpaceInvaders")
GROUPS = {"six": SIX_GAMES, "three": SIX_GAMES[:3]}


def bestiary_names(text: str) -> tuple[str, ...]:
    """Return the Bestiary names of environments. `text` contains their names in Gym or EnvPool, separated by commas.

    Return an empty tuple if one of the names is unknown. Gym's names of ProcGen games contain no mode, so the returned
    names contain no mode either: procgen-starpilot-v0 -> procgen/starpilot. `text` may also be one of GROUPS.
    """
    if text in GROUPS:
        return tuple(f"atari/{game}" for game in GROUPS[text])
    names = [_bestiary_name(part.strip()) for part in text.split(",")]
    return tuple(name for name in names if name) if all(names) else ()


def _bestiary_name(name: str) -> str:
    if match := GYM_PROCGEN.fullmatch(name):
        return f"procgen/{match['game']}" if match["game"] in GAMES else ""
    if (match := ENVPOOL_PROCGEN.fullmatch(name)) and match["game"].lower() in GAMES:
        return f"procgen/{match['game'].lower()}:{match['mode'].lower()}"
    if match := GYM_ATARI.fullmatch(name):
        game = _games_by_lowercase().get(match["game"].lower())
        return f"atari/{game}" if game else ""
    return ""


@cache
def _games_by_lowercase() -> dict[str, str]:
    return {game.lower(): game for game in list_games()}
