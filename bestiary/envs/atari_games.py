"""The Atari games of EnvPool and their actions. Scores of random and human players are in `atari_scores.py`."""

import importlib.util
import os
from functools import cache
from pathlib import Path

from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest

ACTIONS = (
    "NOOP FIRE UP RIGHT LEFT DOWN UPRIGHT UPLEFT DOWNRIGHT DOWNLEFT UPFIRE RIGHTFIRE LEFTFIRE DOWNFIRE "
    "UPRIGHTFIRE UPLEFTFIRE DOWNRIGHTFIRE DOWNLEFTFIRE"
).split()

# {minimal action set: games that have this set}. Numbers are indices into ACTIONS. The emulator defines the sets. Games
# that are not listed use all 18 actions.
MINIMAL_ACTIONS = {
    (0, 1, 3, 4, 11, 12): "AirRaid Carnival DemonAttack Galaxian NameThisGame Pong SirLancelot SpaceInvaders",
    (0, 2, 3, 4, 5, 6, 7, 8, 9): "Asterix CrazyClimber Koolaid LostLuggage MsPacman",
    (0, 1, 2, 3, 4, 5, 10, 11, 12, 13): "Amidar MrDo TimePilot WizardOfWor",
    (0, 1, 2, 3, 4, 5): "BasicMath KingKong Qbert",
    (0, 1, 2, 5, 10, 13): "Bowling Pooyan UpNDown",
    (0, 2, 3, 4, 5): "Frogger Pacman Surround",
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9): "Othello TicTacToe3d VideoChess",
    (0, 1, 11, 12): "Atlantis Atlantis2",
    (0, 1, 2, 5): "Blackjack Casino",
    (0, 1, 3, 4): "Breakout Kaboom",
    (0, 1, 2, 3, 4, 11, 12): "Assault",
    (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15): "Asteroids",
    (1, 3, 4): "Backgammon",
    (0, 1, 2, 3, 4, 6, 7, 11, 12): "BeamRider",
    (0, 1, 3, 4, 5, 8, 9, 11, 12): "Enduro",
    (0, 2, 5): "Freeway",
    (0, 1, 2, 3, 4, 10, 11, 12): "Gopher",
    (0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17): "JourneyEscape",
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13): "KeystoneKapers",
    (0, 2, 3, 4, 5, 8, 9, 11, 12, 13, 14, 15, 16, 17): "KungFuMaster",
    (0, 1, 3, 4, 5, 11, 12, 13): "Phoenix",
    (0, 3, 4): "Skiing",
    (0, 1, 3, 4, 5): "Tetris",
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12): "Turmoil",
    (0, 2, 3, 4, 5, 10, 11, 12): "Tutankham",
    (1, 6, 7, 8, 9): "VideoCheckers",
    (0, 1, 2, 3, 4, 5, 10, 11, 12): "VideoPinball",
}

# Tasks in which the name of an action differs from the direction of the movement: in Pong, RIGHT moves the paddle up.
# Each entry maps a part of an action's name to the direction on the screen.
MOVEMENTS = {"atari/Pong": {"RIGHT": "UP", "LEFT": "DOWN"}}


def list_games() -> list[str]:
    """Return the names of all games whose ROM is installed."""
    names = sorted(path.stem for path in _rom_folder().iterdir())
    return ["".join(word.capitalize() for word in name.split("_")) for name in names]


@cache
def _rom_folder() -> Path:
    """Return EnvPool's folder of ROM files.

    Importing EnvPool takes 1 to 2 s. Therefore EnvPool is imported only if the installed packages do not contain the
    folder, or if the environment variable ENVPOOL_ASSETS_PATH is set.
    """
    for package in ("envpool", "envpool_assets"):
        spec = importlib.util.find_spec(package)
        for base in (spec.submodule_search_locations or []) if spec else []:
            if (folder := Path(base) / "atari" / "roms").is_dir() and "ENVPOOL_ASSETS_PATH" not in os.environ:
                return folder
    from envpool.atari.registration import atari_rom_path

    return Path(atari_rom_path)


def action_names(game: str, full: bool) -> tuple[str, ...]:
    """Return the names of a game's actions: all 18 actions if `full` is True, else the game's minimal action set."""
    minimal = {name: actions for actions, names in MINIMAL_ACTIONS.items() for name in names.split()}
    return tuple(ACTIONS[a] for a in (range(18) if full else minimal.get(game, range(18))))


def check_game(game: str) -> None:
    """Raise UserError if there is no game of this name. The message suggests similar names."""
    if game not in list_games():
        raise UserError(f"atari/{game}: unknown game{suggest(game, list_games())} (see bestiary list envs atari)")
