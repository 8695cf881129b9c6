"""Keys of the player: they play and step through the game, or let the user choose the actions."""

from typing import TYPE_CHECKING

from nicegui import events, ui

if TYPE_CHECKING:
    from bestiary.view.pages.player import PlayerPage

# Directions of keys. The action is the one whose name contains exactly the pressed directions.
DIRECTION_KEYS = {
    "ArrowUp": "UP",
    "ArrowDown": "DOWN",
    "ArrowLeft": "LEFT",
    "ArrowRight": "RIGHT",
    "w": "UP",
    "s": "DOWN",
    "a": "LEFT",
    "d": "RIGHT",
}
FIRE_KEY = " "
IDLE_NAMES = ("NOOP", "noop", "stay", "none", "wait")
LEAVE_FOCUS = "document.activeElement && document.activeElement.blur()"
# The browser scrolls the page with some keys of the player. This must not move the picture out of the window.
KEEP_PAGE = """
window.userPlays = false;
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest('input, select, textarea')) return;
  const keys = window.userPlays ? ['ArrowUp', 'ArrowDown', 'ArrowLeft', 'ArrowRight', ' '] : ['Home', 'End'];
  if (keys.includes(event.key)) event.preventDefault();
});
"""
SHOW_PICTURE = "document.querySelector('.player-pictures').scrollIntoView({block: 'nearest'})"


def action_of_keys(pressed: set[str], names: tuple[str, ...]) -> str | None:
    """Return the action that the pressed keys mean.

    A digit K means the action number K. If there is no such action, return None: the agent then chooses the action.
    Without a digit, the action is searched whose name consists of the pressed directions, and FIRE if the space bar is
    pressed: UPFIRE for the keys up and space.
    """
    digits = sorted(int(key) for key in pressed if key.isdecimal() and len(key) == 1)
    if digits:
        return names[digits[0]] if digits[0] < len(names) else None
    wanted = {DIRECTION_KEYS[key] for key in pressed if key in DIRECTION_KEYS}
    if FIRE_KEY in pressed:
        wanted.add("FIRE")
    if not wanted:
        return idle_action(names)
    if exact := [name for name in names if split_action(name) == wanted]:
        return exact[0]
    # No action has all pressed directions and FIRE: take the action with most of them, rather a direction than FIRE.
    partial = [name for name in names if split_action(name) and split_action(name) < wanted]
    return max(
        partial,
        key=lambda name: (len(split_action(name)), "FIRE" not in split_action(name)),
        default=idle_action(names),
    )


def split_action(name: str) -> set[str]:
    """Return the directions and FIRE in the name of an action: UPRIGHTFIRE -> UP, RIGHT, FIRE."""
    rest = name.upper().replace("_", "").replace("-", "").replace(" ", "")
    words = {word for word in ("UP", "DOWN", "LEFT", "RIGHT", "FIRE") if word in rest}
    return words if "".join(words) and sum(map(len, words)) == len(rest) else set()


def idle_action(names: tuple[str, ...]) -> str:
    """Return the action that does nothing, or the first action."""
    return next((name for name in names if name in IDLE_NAMES), names[0])


class KeyboardControl:
    """Handles the keys of the player. If `has_control` is set, the user chooses the actions."""

    def __init__(self, player: "PlayerPage"):
        self.player = player
        self.has_control = False
        self.pressed: set[str] = set()
        ui.keyboard(on_key=self._on_key, ignore=["input", "select", "textarea"])
        ui.run_javascript(KEEP_PAGE)

    @property
    def action(self) -> str | None:
        """The action that the user has chosen, or None if the agent chooses."""
        if not self.has_control or self.player.game is None:
            return None
        return action_of_keys(self.pressed, self.player.game.action_names)

    async def take_over(self) -> None:
        """Let the user choose the actions from the shown step on, and play."""
        if await self.player.rewind(self.player.shown):
            self.has_control = True
            self.pressed = set()
            # If a button had the focus, the space bar would press it.
            ui.run_javascript(f"{LEAVE_FOCUS}; window.userPlays = true; {SHOW_PICTURE}")
            self.player.questions.show_control(True)
            await self.player.play()

    def hand_back(self) -> None:
        """Let the agent choose the actions again. The game goes on."""
        self.has_control = False
        ui.run_javascript("window.userPlays = false")
        self.player.questions.show_control(False)

    async def _on_key(self, event: events.KeyEventArguments) -> None:
        name = str(event.key.name)
        key = name.lower() if len(name) == 1 else name
        if self.has_control:
            if event.action.keydown and key == "Escape":
                self.hand_back()
            elif event.action.keydown:
                self.pressed.add(key)
            else:
                self.pressed.discard(key)
            return
        if not event.action.keydown or event.modifiers.ctrl or event.modifiers.alt or event.modifiers.meta:
            return
        count = 10 if event.modifiers.shift else 1
        if key == "p" and not event.action.repeat:
            await self.player.toggle()
        elif key == "ArrowLeft":
            await self.player.step_by(-count)
        elif key == "ArrowRight":
            await self.player.step_by(count)
        elif key == "r" and not event.action.repeat:
            await self.player.to_reward(-1 if event.modifiers.shift else 1)
        elif key == "Home":
            await self.player.show(0)
        elif key == "End":
            await self.player.show(10**9)
