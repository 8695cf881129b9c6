"""River Raid: reward components from the RAM of the game.

The RAM is read once per step, after the last emulator frame of the step (by default, a step has 4 frames). Therefore
two kinds of events within a single step are not detected: a bullet that is fired and disappears, and a movement of the
plane to one side and back. No points are missed, because the emulator sums the points of all frames of a step.
"""

from functools import cache

import numpy as np

from bestiary.envs.rewards.components import RewardComponent
from bestiary.step import Arrays

# RAM addresses
PLAYER_X = 51
BULLET_X = 117
BULLET_Y = 50
LIVES = 64
WAITING = 70  # 0 while the river scrolls
FUEL = 55  # fuel level, high byte; the low byte has the next address
OBJECT_TYPES = slice(32, 38)  # types of the six objects on the screen, in the order in which they leave it
SCORE_DIGITS = slice(77, 88, 2)  # digits of the score, highest first; each byte is 8 x digit, or BLANK_DIGIT

# RAM values
CENTER_X = 76  # value of PLAYER_X in the middle of the river
NO_BULLET = 180  # value of BULLET_Y if there is no bullet
BLANK_DIGIT = 88
DEPOT = 10  # object type of a fuel depot
EXPLOSIONS = (1, 2, 3)  # object types of explosions
HALTED = 48  # value of WAITING while the river stands still, because the game waits for an action
NOT_STARTED = 88  # value of LIVES before the game starts; the player then has all four lives
LAST_LIFE = 89  # value of LIVES in the last life, in which the screen shows no digit

DEPOT_POINTS = 80
OTHER_POINTS = (30, 60, 100, 500)  # points for a tanker, helicopter, jet, bridge
TYPICAL_SCORES = (0, 30, 60, 80, 100, 500)  # points of one step
# Number of fuel depots shot in a step with each of these points.
DEPOT_COUNTS = tuple(float(score == DEPOT_POINTS) for score in TYPICAL_SCORES)

COMPONENTS = {
    "reward": RewardComponent("reward of the environment: the points scored in the step", TYPICAL_SCORES, "score"),
    "score": RewardComponent("points scored in the step", TYPICAL_SCORES),
    "fuel_shot": RewardComponent("number of fuel depots shot", DEPOT_COUNTS, "score"),
    "bullet": RewardComponent("1 while a bullet of the player is on the screen", (0, 1)),
    "moved": RewardComponent("1 if the plane moved sideways", (0, 1)),
    "off_center": RewardComponent(
        "square of the distance, in pixels, between the plane and the middle of the river",
        tuple(float(distance**2) for distance in range(41)),
    ),
    "fuel": RewardComponent("fuel level, 0 to 1", (0, 0.25, 0.5, 0.75, 1)),
    "halted": RewardComponent("1 while the river stands still: before the start and after a crash", (0, 1)),
}


def read_ram(ram: np.ndarray) -> Arrays:
    """Return the state of N games, given their RAM, uint8 [N,128]. The results are int32 arrays [N].

    `fuel` is from 0 to 65,535. `objects` [N,6] are the types of the objects on the screen. `score` and `lives` are the
    numbers that the screen shows. `waiting` is 0 while the river scrolls.
    """
    cells = ram.astype(np.int32)  # differences of bytes would wrap around: 42 - 76 = 222
    digits = cells[:, SCORE_DIGITS]
    lives = cells[:, LIVES]
    return {
        "player_x": cells[:, PLAYER_X],
        "bullet_x": cells[:, BULLET_X],
        "bullet_y": cells[:, BULLET_Y],
        "fuel": 256 * cells[:, FUEL] + cells[:, FUEL + 1],
        "objects": cells[:, OBJECT_TYPES],
        "score": np.where(digits == BLANK_DIGIT, 0, digits // 8) @ 10 ** np.arange(5, -1, -1, dtype=np.int32),
        "lives": np.select([lives == NOT_STARTED, lives == LAST_LIFE], [4, 1], lives // 8 + 1),
        "waiting": cells[:, WAITING],
    }


def compute_components(before: np.ndarray, after: np.ndarray, score: np.ndarray, lost: np.ndarray) -> Arrays:
    """Return the reward components of one step of N games by name, each float32 [N].

    Args:
        before: RAM before the step, uint8 [N,128].
        after: RAM after the step, uint8 [N,128].
        score: points scored in the step, [N].
        lost: bool [N], True if a life was lost. The game then moves the plane to the middle. This does not count as a
            movement: `moved` is 0.
    """
    x = after[:, PLAYER_X].astype(np.int32)
    components = {
        "fuel_shot": count_depots_shot(before[:, OBJECT_TYPES], after[:, OBJECT_TYPES], score),
        "bullet": after[:, BULLET_Y] != NO_BULLET,
        "moved": (after[:, PLAYER_X] != before[:, PLAYER_X]) & ~lost,
        "off_center": (x - CENTER_X) ** 2,
        "fuel": (256.0 * after[:, FUEL] + after[:, FUEL + 1]) / 65_535,
        "halted": after[:, WAITING] == HALTED,
    }
    return {name: values.astype(np.float32) for name, values in components.items()}


def count_depots_shot(before: np.ndarray, after: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Return the number of fuel depots shot in a step, int64 [N].

    `before` and `after` are the types of the objects before and after the step, uint8 [N,6]; `score` are the points of
    the step, [N]. The points nearly always determine the number of depots: for example, only a depot is worth 80
    points. Sometimes several numbers are possible: 160 points are two depots, or a jet and a helicopter. In this case,
    count the depots that turned into explosions, and return the possible number that is nearest to this count.
    """
    count = np.zeros(len(score), np.int64)
    for row in np.flatnonzero(score > 0):
        possible = _possible_depots(int(score[row]))
        if len(possible) == 1:
            count[row] = possible[0]
        elif possible:
            exploded = _count_exploded_depots(before[row], after[row])
            count[row] = min(possible, key=lambda c: abs(c - exploded))
    return count


@cache
def _possible_depots(points: int) -> tuple[int, ...]:
    """Return how many of one to three shot objects can be depots if the objects are worth `points`: 160 -> (0, 2)."""
    objects = [(DEPOT_POINTS, 1), *((value, 0) for value in OTHER_POINTS)]
    sums = {0: {(0, 0)}}  # number of objects -> possible pairs (points, depots)
    for k in range(1, 4):
        sums[k] = {(total + value, depots + one) for total, depots in sums[k - 1] for value, one in objects}
    return tuple(sorted({depots for k in (1, 2, 3) for total, depots in sums[k] if total == points}))


def _count_exploded_depots(before: np.ndarray, after: np.ndarray) -> int:
    """Return how many depots turned into explosions, given the types of the six objects before and after a step.

    When objects leave the screen, the types of the other objects move towards the start of the list, by 0 to 2 places
    per step. The RAM does not contain the number of places. This function uses the number (0, 1 or 2) for which the
    most objects keep their type in the step.
    """

    def count_unchanged(shift: int) -> int:
        return int((before[shift:] == after[: len(after) - shift]).sum())

    shift = max(range(3), key=lambda s: (count_unchanged(s), -s))
    old, new = before[shift:], after[: len(after) - shift]
    return int(((old == DEPOT) & np.isin(new, EXPLOSIONS)).sum())
