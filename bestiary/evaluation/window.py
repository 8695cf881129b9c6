"""A window on the screen that shows the images of a game while the agent plays."""

import os
import sys
from types import TracebackType

import numpy as np

from bestiary.utils.images import enlarge

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # pygame would print its version when it is imported

MIN_HEIGHT = 420  # a smaller image is enlarged by an integer factor to about this height, in pixels
HIDDEN_DRIVERS = ("dummy", "offscreen", "evdev")  # video drivers of SDL that need no screen and show nothing


def display_problem() -> str | None:
    """Return the reason why no window can be opened on this machine, or None if one can be opened.

    Every driver that the user sets with the environment variable SDL_VIDEODRIVER counts as a display, even `dummy`.
    """
    try:
        import pygame
    except ImportError:
        return "the package pygame is not installed (pip install 'bestiary[window]')"
    chosen = os.environ.get("SDL_VIDEODRIVER")
    if sys.platform == "linux" and not (chosen or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "this machine has no display (DISPLAY and WAYLAND_DISPLAY are not set)"
    try:
        pygame.display.init()
        driver = pygame.display.get_driver()
    except pygame.error as error:
        return f"the display cannot be opened ({error})"
    finally:
        pygame.display.quit()
    return None if chosen or driver not in HIDDEN_DRIVERS else "this machine has no display"


class Window:
    """A window that shows one image after the other with a constant frame rate.

    A `with` statement closes the window at its end. Call `display_problem` first, to check that a window can be opened.
    """

    def __init__(self, title: str, fps: float):
        self.title = title
        self.fps = fps
        self.num_shown = 0

    def __enter__(self) -> "Window":
        import pygame

        pygame.display.init()
        self.clock = pygame.time.Clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import pygame

        pygame.display.quit()

    def show(self, image: np.ndarray) -> bool:
        """Show an image [H,W,3] for 1/fps seconds. Return False if the user has closed the window or pressed Escape.

        The first image determines the size of the window.
        """
        import pygame

        image = enlarge(image)
        if self.num_shown == 0:
            scale = max(1, round(MIN_HEIGHT / image.shape[0]))
            self.size = (image.shape[1] * scale, image.shape[0] * scale)
            self.screen = pygame.display.set_mode(self.size)
            pygame.display.set_caption(self.title)
        surface = pygame.surfarray.make_surface(image.swapaxes(0, 1))
        self.screen.blit(pygame.transform.scale(surface, self.size), (0, 0))
        pygame.display.flip()
        self.num_shown += 1
        self.clock.tick(self.fps)
        closed = (
            event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE)
            for event in pygame.event.get()
        )
        return not any([*closed])
