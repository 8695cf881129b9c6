"""One Atari emulator of ale-py, which replaces EnvPool in games whose RAM is changed (`--set`).

EnvPool steps emulators fast but cannot change their RAM. `AleBackend` has the methods of `EnvPoolBackend`, so
`AtariVectorEnv` can use either of the two; its code for lives, frame stacks and time limits does not depend on the
choice. `AleBackend` computes the same frames as EnvPool: the maximum of the last two emulator frames, scaled by area.
"""

import re
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from bestiary.envs.envpool_backend import Batch
from bestiary.utils.errors import UserError

INSTALL_HINT = "needs the package ale-py: pip install 'bestiary[interventions]'"


def import_ale() -> Any:
    """Import and return the package ale_py. Raise UserError if it is not installed."""
    try:
        import ale_py
        import ale_py.roms
    except ImportError as error:
        raise UserError(f"--set with an Atari game {INSTALL_HINT}") from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return ale_py


class AleBackend:
    """One emulator. The methods `send`, `recv`, `reset`, `render` and `close` are those of `EnvPoolBackend`."""

    def __init__(
        self,
        game: str,
        *,
        frame_skip: int,
        frame_size: tuple[int, int],
        gray: bool,
        full_actions: bool,
        fire: bool,
    ):
        """Create the emulator. If `fire` is True, `reset` presses FIRE in games that have this action."""
        ale_py = import_ale()
        self.frame_skip = frame_skip
        self.frame_size = frame_size
        self.gray = gray
        # Number of no-op frames at the start of a game. EnvPool draws this number at random. To repeat a game of
        # EnvPool, set it to the number that EnvPool drew.
        self.noops = 0
        self.noop = ale_py.Action.NOOP
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(ale_py.roms.get_rom_path(rom_name(game)))
        self.actions = self.ale.getLegalActionSet() if full_actions else self.ale.getMinimalActionSet()
        self.fire = ale_py.Action.FIRE if fire and ale_py.Action.FIRE in self.ale.getMinimalActionSet() else None
        self.screens = deque[np.ndarray](maxlen=2)  # the last two emulator frames of a step
        self.sent = self.noop  # the action of the next step

    def reset(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Start a new game with `noops` no-op frames. Return the first frame and the info."""
        self.ale.reset_game()
        for _ in range(self.noops):
            self.ale.act(self.noop)
        if self.fire is not None:
            self.ale.act(self.fire)
        self.screens.clear()
        self.screens.append(self._screen())
        return self._frame(), self._info()

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        """Store the action of the next step."""
        self.sent = self.actions[int(actions[0])]

    def recv(self) -> Batch:
        """Perform a step with the stored action, and return (frame, reward, done, info)."""
        reward = 0.0
        self.screens.clear()
        for k in range(self.frame_skip):
            reward += self.ale.act(self.sent)
            if k >= self.frame_skip - 2:
                self.screens.append(self._screen())
            if self.ale.game_over():
                self.screens.append(self._screen())
                break
        info = self._info()
        return self._frame(), np.array([reward], np.float32), info["terminated"].astype(bool), info

    def render(self) -> list[np.ndarray]:
        """Return the RGB image [H,W,3] of the emulator."""
        return [self.ale.getScreenRGB()]

    def close(self) -> None:
        """Do nothing: the emulator is freed with this object."""

    def snapshot(self) -> Any:
        """Return the state of the emulator, for `redraw` and `ram_of`."""
        return self.ale.cloneState()

    def redraw(self, snapshot: Any, ram: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the observed frame [1,C,H,W] and the RGB screen [210,160,3] of a snapshot with a changed RAM.

        The screen shows a change of the RAM only in the next emulator frames. Therefore two more emulator frames are
        computed without an action. The values in `ram`, {address: value}, are written before each of these frames. The
        state of the emulator does not change.
        """
        current = self.ale.cloneState()
        old_screens = deque(self.screens, maxlen=2)
        self.ale.restoreState(snapshot)
        self.screens.clear()
        for _ in range(2):
            self.write_ram(ram)
            self.ale.act(self.noop)
            self.screens.append(self._screen())
        frame, rgb = self._frame(), self.ale.getScreenRGB()
        self.ale.restoreState(current)
        self.screens = old_screens
        return frame, rgb

    def ram_of(self, snapshot: Any) -> np.ndarray:
        """Return the RAM of a snapshot, uint8 [128]. The state of the emulator does not change."""
        current = self.ale.cloneState()
        self.ale.restoreState(snapshot)
        ram = self.ale.getRAM()
        self.ale.restoreState(current)
        return ram

    def write_ram(self, ram: Mapping[int, int]) -> None:
        """Write values to addresses of the RAM."""
        for address, value in ram.items():
            self.ale.setRAM(address, value)

    def _screen(self) -> np.ndarray:
        return self.ale.getScreenGrayscale() if self.gray else self.ale.getScreenRGB()

    def _frame(self) -> np.ndarray:
        """Return the observed frame, uint8 [1,C,H,W]: the maximum of `screens`, scaled to `frame_size`."""
        screen = np.max(list(self.screens), axis=0)
        channels = screen[None] if self.gray else np.moveaxis(screen, -1, 0)
        return scale_by_area(channels, self.frame_size)[None]

    def _info(self) -> dict[str, np.ndarray]:
        return {
            "lives": np.array([self.ale.lives()], np.int32),
            "terminated": np.array([self.ale.game_over()], np.int32),
            "ram": self.ale.getRAM()[None].copy(),
        }


def rom_name(game: str) -> str:
    """Return the name of a game in ale-py: SpaceInvaders -> space_invaders."""
    return re.sub(r"(?<!^)(?=[A-Z]|3d)", "_", game).lower()


def scale_by_area(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scale images [C,H,W] to another size: a new pixel is the mean of the old pixels that it covers.

    Partly covered pixels are weighted by the covered area. The sums are computed in float32, first along the width and
    then along the height, in the order of the pixels. EnvPool does the same. Means close to a half, such as 99.5, are
    therefore rounded as in EnvPool.
    """
    height, width = size
    narrowed = _scale_last_axis(images.astype(np.float32), width)  # [C,H,w]
    means = _scale_last_axis(narrowed.swapaxes(1, 2), height).swapaxes(1, 2)  # [C,h,w]
    return np.rint(means).astype(np.uint8)


def _scale_last_axis(lines: np.ndarray, new: int) -> np.ndarray:
    """Scale the last axis of `lines` to the length `new`: each new pixel is the mean of the pixels that it covers."""
    pixels, weights = _coverage(lines.shape[-1], new)
    total = lines[..., pixels[0]] * weights[0]
    for indices, share in zip(pixels[1:], weights[1:], strict=True):
        total = total + lines[..., indices] * share
    return total


@cache
def _coverage(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which old pixels each new pixel covers if an axis of `old` pixels is scaled to `new` pixels.

    Column k of the two returned arrays [n,new] belongs to the new pixel k. The first array contains the indices of the
    old pixels that it covers (int64), the second their weights in its mean (float32). Unused entries have weight 0.
    """
    scale = old / new
    first = np.floor(np.arange(new) * scale + 1e-9).astype(np.int64)
    count = int(np.ceil(scale)) + 1
    pixels = first + np.arange(count)[:, None]  # [n,new]
    left, right = np.arange(new) * scale, (np.arange(new) + 1) * scale
    overlap = np.clip(np.minimum(right, pixels + 1) - np.maximum(left, pixels), 0, None)
    overlap[(overlap < 1e-3) | (pixels >= old)] = 0
    return np.minimum(pixels, old - 1), (overlap / np.minimum(scale, old - left)).astype(np.float32)
