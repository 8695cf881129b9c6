"""River Raid from its RAM: where the plane is, whether its bullet flies, what was shot.

The RAM is seen once a decision, after its last frame. So a bullet that was fired and gone within four frames is missed, and so
is a move there and back; what a decision scored is whole, because the emulator adds up all of its frames.
"""

from functools import cache

import numpy as np

from bestiary.envs.weightings import Component
from bestiary.rollout import Arrays

PLAYER_X, BULLET_X, BULLET_Y, LIVES, WAITING = 51, 117, 50, 64, 70
FUEL = 55  # the high byte; the low one follows it
TYPES = slice(32, 38)  # what the six objects on the screen are; the first is the next to leave it
DIGITS = slice(77, 88, 2)  # of the score as it is drawn, 100,000s first: eight times each, and BLANK for none
CENTER, NO_BULLET, BLANK = 76, 180, 88
DEPOT, EXPLOSIONS = 10, (1, 2, 3)
HALTED = 48  # of WAITING: the river does not move before the player does something
NOT_BEGUN, LAST = 88, 89  # of LIVES: the game waits with all four; no digit is drawn for the last one

DEPOT_POINTS = 80
OTHER_POINTS = (30, 60, 100, 500)  # tanker, helicopter, jet, bridge
SCORES = (0, 30, 60, 80, 100, 500)  # of one step, nearly always

COMPONENTS = {
    "reward": Component("the environment's own reward: the score", SCORES, "score"),
    "score": Component("points scored in the step", SCORES),
    "fuel_shot": Component("fuel depots that were shot", tuple(float(s == DEPOT_POINTS) for s in SCORES), "score"),
    "bullet": Component("1 while a bullet of the player's is on the screen", (0, 1)),
    "moved": Component("1 where the plane is not where it was a step before", (0, 1)),
    "off_center": Component(
        "squared distance of the plane from the middle, in pixels", tuple(float(d * d) for d in range(41))
    ),
    "fuel": Component("what is left in the tank, 0 to 1", (0, 0.25, 0.5, 0.75, 1)),
    "halted": Component("1 while the river stands still: it waits for the player, or a life was just lost", (0, 1)),
}


def read(ram: np.ndarray) -> Arrays:
    """What the RAM uint8 [N,128] says, int32 [N] each (`objects`: [N,6]): the plane, its bullet, fuel of 65,535, the objects on
    the screen by type, the score and lives as they are drawn, and whether the river waits (0: it flows)."""
    cells = ram.astype(np.int32)  # bytes would wrap around: 42 - 76 = 222
    digits, lives = cells[:, DIGITS], cells[:, LIVES]
    return {
        "player_x": cells[:, PLAYER_X],
        "bullet_x": cells[:, BULLET_X],
        "bullet_y": cells[:, BULLET_Y],
        "fuel": 256 * cells[:, FUEL] + cells[:, FUEL + 1],
        "objects": cells[:, TYPES],
        "score": np.where(digits == BLANK, 0, digits // 8) @ 10 ** np.arange(5, -1, -1, dtype=np.int32),
        "lives": np.select([lives == NOT_BEGUN, lives == LAST], [4, 1], lives // 8 + 1),
        "waiting": cells[:, WAITING],
    }


def measure(before: np.ndarray, after: np.ndarray, score: np.ndarray, lost: np.ndarray) -> Arrays:
    """Components of one step of N games from their RAM uint8 [N,128] before and after it, what it scored [N], and whether it
    lost a life [N]: the plane is then put back to the middle, which is no move. In every step, so of what `read` gives only
    that which a component needs."""
    x = after[:, PLAYER_X].astype(np.int32)
    found = {
        "fuel_shot": depots_shot(before[:, TYPES], after[:, TYPES], score),
        "bullet": after[:, BULLET_Y] != NO_BULLET,
        "moved": (after[:, PLAYER_X] != before[:, PLAYER_X]) & ~lost,
        "off_center": (x - CENTER) ** 2,
        "fuel": (256.0 * after[:, FUEL] + after[:, FUEL + 1]) / 65_535,
        "halted": after[:, WAITING] == HALTED,
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


def depots_shot(before: np.ndarray, after: np.ndarray, score: np.ndarray) -> np.ndarray:
    """How many of the objects shot in a step were fuel depots, int64 [N], from types uint8 [N,6] and points [N].

    Nearly always the points alone say it: nothing else adds up to 80. Where they leave a doubt (160 is two depots, or a jet
    and a helicopter), the depots that turned into explosions are counted."""
    count = np.zeros(len(score), np.int64)
    for row in np.flatnonzero(score > 0):
        possible = _possible_depots(int(score[row]))
        if len(possible) == 1:
            count[row] = possible[0]
        elif possible:
            exploded = _exploded(before[row], after[row])
            count[row] = min(possible, key=lambda c: abs(c - exploded))
    return count


@cache
def _possible_depots(points: int) -> tuple[int, ...]:
    """The numbers of depots among at most three objects that together are worth so many points."""
    sums = {0: {(0, 0)}}  # objects so far -> (points, depots)
    for k in range(1, 4):
        steps = [(DEPOT_POINTS, 1), *((worth, 0) for worth in OTHER_POINTS)]
        sums[k] = {(p + worth, depots + one) for p, depots in sums[k - 1] for worth, one in steps}
    return tuple(sorted({depots for k in (1, 2, 3) for p, depots in sums[k] if p == points}))


def _exploded(before: np.ndarray, after: np.ndarray) -> int:
    """Depots that became explosions; objects have moved up by as many places as makes most of them what they were."""

    def same(shift: int) -> int:
        return int((before[shift:] == after[: len(after) - shift]).sum())

    shift = max(range(3), key=lambda s: (same(s), -s))
    was, now = before[shift:], after[: len(after) - shift]
    return int(((was == DEPOT) & np.isin(now, EXPLOSIONS)).sum())
