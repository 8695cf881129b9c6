"""Page "Player": play a game of an agent, step through it, and see what the agent computes."""

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from nicegui import app, events, ui

from bestiary.utils.console import printable
from bestiary.utils.errors import RunError, UserError
from bestiary.view.catalogue import Catalogue
from bestiary.view.game import WatchedGame
from bestiary.view.overlays import NO_OVERLAY, Overlays
from bestiary.view.page_elements import clicked_x, page_frame, page_url, section
from bestiary.view.pages.agent_output import GameCurves, StepOutput
from bestiary.view.pages.game_choice import GameChoice, PlayerQuery, make_setup
from bestiary.view.pages.keyboard import LEAVE_FOCUS, KeyboardControl
from bestiary.view.pages.questions import Questions

CHART_SECONDS = 0.3  # while playing, charts are updated at this interval
FRAMES_AHEAD = 5  # while playing, the server sends at most this number of frames before the browser has shown them
MAX_WAIT = 30.0  # seconds after which playing stops if the browser does not answer
SPEEDS = {"normal speed": 1.0, "half speed": 0.5, "2x": 2.0, "as fast as possible": 0.0}
MAX_GAMES = 8  # maximum number of games that are open at once, in all tabs

_open_games: list["PlayerPage"] = []  # the oldest first


def player_page(catalogue: Catalogue, query: PlayerQuery) -> None:
    """Build the page."""
    with page_frame("Player", (query.run, page_url("run", run=query.run)), ("Player", query.url())):
        PlayerPage(catalogue, query)


class PlayerPage:
    """The elements of the page and the game of one browser tab."""

    def __init__(self, catalogue: Catalogue, query: PlayerQuery):
        self.catalogue = catalogue
        self.query = query
        self.game: WatchedGame | None = None
        self.overlays: Overlays | None = None
        self.shown = 0  # the step that is shown
        self.is_playing = False
        self.is_busy = False
        self.is_closed = False
        self.charts_drawn = 0.0  # time of the last update of the charts, in seconds (time.monotonic)
        # All operations of a game are done in one thread, so that they do not stop the server.
        self.thread = ThreadPoolExecutor(1, "game")
        self.client = ui.context.client
        self.keyboard: KeyboardControl | None = None
        with section("Game"):
            GameChoice(catalogue, query)
        self.message = ui.label().classes("warning").props("role=alert")
        self.body = ui.element("div").classes("player")
        self.client.on_delete(self.close)
        ui.timer(0.05, self.start, once=True)

    async def start(self) -> None:
        """Open the game and play it to the step in the URL."""
        self.message.text = "The agent and the environment are loaded ..."
        try:
            self.game = await self.compute(lambda: WatchedGame(make_setup(self.catalogue, self.query)))
        except (UserError, RunError, KeyError, OSError) as error:
            self.message.text = printable(str(error))
            return
        self.overlays = Overlays(self.game)
        _open_games.append(self)
        while len(_open_games) > MAX_GAMES:
            _open_games[0].stop("This game was closed, because more than eight games are open.")
        self.message.text = ""
        with self.body:
            self._add_body()
        await self.play_to(self.query.step)
        await self.show(self.query.step)

    @property
    def agent_names(self) -> list[str]:
        """The names of the agents: their runs, with the checkpoints if both agents are of the same run."""
        if self.game is None or not self.game.setup.others:
            return [self.query.run]
        keys = [self.query.run, self.query.second or ""]
        if keys[0] != keys[1]:
            return keys
        steps = [branch.viewer.checkpoint_steps for branch in self.game.branches]
        return [f"{which}, step {count:,}" for which, count in zip(("first", "second"), steps, strict=True)]

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread of the game. Raise RunError if the game was closed."""
        if self.is_closed:
            raise RunError("the game was closed")
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    # --- elements ---

    def _add_body(self) -> None:
        assert self.game is not None
        assert self.overlays is not None
        game = self.game
        with ui.element("div").classes("player-top"):
            with ui.element("section").classes("box player-pictures"):
                self.pictures = []
                names = self.agent_names
                with ui.element("div").classes("pictures"):
                    for name in names:
                        with ui.element("figure"):
                            picture = ui.image().classes("picture").props("no-spinner no-transition fit=contain")
                            picture.props["alt"] = f"Game of {name}"
                            self.pictures.append(picture)
                            if len(names) > 1:
                                with ui.element("figcaption"):
                                    ui.label(name)
                self._add_controls()
            with ui.element("section").classes("box player-output"):
                self.output = StepOutput(game, names)
        with section("Value over time"):
            self.curves = GameCurves(game, names, self._seek)
        self.questions = Questions(self)
        self.keyboard = KeyboardControl(self)

    def _add_controls(self) -> None:
        assert self.game is not None
        assert self.overlays is not None
        self.position = ui.slider(min=0, max=1, value=0, on_change=self._on_slider)
        self.position.props('tabindex=-1 aria-label="Step"').classes("position")
        with ui.element("div").classes("controls buttons"):
            flat = "flat round dense"
            ui.button(icon="first_page", on_click=lambda: self.show(0)).props(f'{flat} aria-label="First step"')
            ui.button(icon="chevron_left", on_click=lambda: self.step_by(-1)).props(f'{flat} aria-label="Back"')
            self.play_button = ui.button(icon="play_arrow", on_click=self.toggle).props('round dense aria-label="Play"')
            ui.button(icon="chevron_right", on_click=lambda: self.step_by(1)).props(f'{flat} aria-label="Forward"')
            ui.button(icon="last_page", on_click=lambda: self.show(10**9)).props(f'{flat} aria-label="Newest step"')
            ui.button("Next reward", on_click=lambda: self.to_reward(1)).props("flat dense no-caps")
            self.step_text = ui.label().classes("step-text")
        with ui.element("div").classes("controls"):
            self.speed = ui.select(list(SPEEDS), value="normal speed", label="Speed").props("dense")
            self.overlay = ui.select(self.overlays.kinds(), value=NO_OVERLAY, label="Overlay").props("dense")
            self.overlay.on_value_change(self._on_overlay)
            self.speed.on_value_change(lambda: ui.run_javascript(LEAVE_FOCUS))
            self.target = ui.number("Go to step", min=0, precision=0).props("dense").classes("seed")
            self.target.on("keydown.enter", self._go_to)
            ui.button("Go", on_click=self._go_to).props("flat dense no-caps")
        ui.label(
            "Keys: P play or pause, arrows back and forward (with Shift: 10 steps), R next reward (with Shift: "
            "previous), Home, End."
        ).classes("muted")

    # --- playing ---

    async def toggle(self) -> None:
        """Start or stop playing."""
        if self.is_playing:
            self.is_playing = False
        else:
            await self.play()

    async def play(self) -> None:
        """Play from the shown step: first the known steps, then new ones, until the user stops or the game ends."""
        assert self.game is not None
        if self.is_playing or self.is_busy:
            return
        self.is_playing = True
        self.play_button.props('icon=pause aria-label="Pause"')
        due = time.monotonic()
        frames, frame_rate = 0, self.game.frame_rate
        while self.is_playing and self.client.has_socket_connection:
            if not await self._advance():
                break
            await self._draw(during_play=True)
            frames += 1
            if frames % FRAMES_AHEAD == 0 and not await self._wait_for_browser():
                break
            speed = SPEEDS[self.speed.value]
            # If drawing takes longer than a frame, the delay is not made up for later.
            due = max(due + (1 / (speed * frame_rate) if speed else 0), time.monotonic() - 0.1)
            await asyncio.sleep(max(0.001, due - time.monotonic()))
        self.is_playing = False
        self.play_button.props('icon=play_arrow aria-label="Play"')
        await self._draw()

    async def _wait_for_browser(self) -> bool:
        """Wait until the browser has processed all messages. Without this, a slow browser would lag behind."""
        try:
            await self.client.run_javascript("true", timeout=MAX_WAIT)
        except TimeoutError:
            return False
        return True

    async def _advance(self) -> bool:
        """Go to the next step. Return False at the end of the game."""
        if self.game is None:
            return False
        if self.shown + 1 < len(self.game.steps):
            self.shown += 1
            return True
        if self.game.is_over:
            return False
        action = self.keyboard.action if self.keyboard is not None else None
        if not await self.guarded(partial(self.game.advance, action)):
            return False
        self.shown = len(self.game.steps) - 1
        return not self.game.is_over

    async def guarded(self, function: Callable[[], Any]) -> bool:
        """Call a function of the game in its thread. Show an error and return False if it fails."""
        self.is_busy = True
        try:
            await self.compute(function)
        except (UserError, RunError) as error:
            self.message.text = printable(str(error))
            return False
        finally:
            self.is_busy = False
        return True

    async def show(self, step: int) -> None:
        """Show a step that was already played, or the newest one if `step` is larger."""
        if self.game is not None:
            self.shown = min(max(0, step), len(self.game.steps) - 1)
            await self._draw()

    async def step_by(self, count: int) -> None:
        """Go forward or back by a number of steps. If necessary, the game is played on."""
        assert self.game is not None
        self.is_playing = False
        for _ in range(max(0, count)):
            if self.is_busy or not await self._advance():
                break
        if count < 0:
            self.shown = max(0, self.shown + count)
        await self._draw()

    async def to_reward(self, direction: int) -> None:
        """Show the next (1) or previous (-1) step with a reward. If necessary, the game is played on."""
        assert self.game is not None
        if self.is_busy:
            return
        self.is_playing = False
        rewarded = [k + 1 for k, step in enumerate(self.game.steps) if step.reward]
        if direction < 0:
            await self.show(max((k for k in rewarded if k < self.shown), default=0))
            return
        found = min((k for k in rewarded if k > self.shown), default=None)
        while found is None and self.game is not None and not self.game.is_over:
            first = len(self.game.steps) - 1
            if not await self.guarded(partial(self._play_to_reward, first + 50)):
                return
            if self.game is not None and self.game.steps[-1 if self.game.is_over else -2].reward:
                found = len(self.game.steps)
            self.step_text.text = f"step {first} ..."
        await self.show(10**9 if found is None else found)

    def _play_to_reward(self, last: int) -> None:
        assert self.game is not None
        while len(self.game.steps) <= last and not self.game.is_over:
            self.game.advance()
            if self.game.steps[-1 if self.game.is_over else -2].reward:
                break

    async def play_to(self, step: int) -> None:
        """Play new steps up to a step or to the end of the game."""
        while self.game is not None and len(self.game.steps) <= step and not self.game.is_over:
            if not await self.guarded(self._play_some(step)):
                break
            if len(self.game.steps) % 50 == 0:
                self.step_text.text = f"step {len(self.game.steps)} ..."

    def _play_some(self, step: int) -> Callable[[], None]:
        def play() -> None:
            assert self.game is not None
            for _ in range(50):
                if len(self.game.steps) <= step and not self.game.is_over:
                    self.game.advance()

        return play

    async def _go_to(self) -> None:
        self.is_playing = False
        step = int(self.target.value or 0)
        await self.play_to(step)
        await self.show(step)

    async def rewind(self, step: int) -> bool:
        """Make a step the newest one, so that the game can be continued in another way. Return False if this failed."""
        assert self.game is not None
        assert self.overlays is not None
        self.is_playing = False
        if step < len(self.game.steps) - 1 or self.game.is_over:
            self.message.text = "The game is played again up to this step ..."
            if not await self.guarded(partial(self.game.rewind, step)):
                return False
            self.overlays.forget_from(step)
            self.message.text = ""
        self.shown = step
        await self._draw()
        return True

    # --- drawing ---

    async def _draw(self, during_play: bool = False) -> None:
        """Draw the step that is shown."""
        if self.game is None or self.overlays is None:  # the tab was closed
            return
        game, overlays, t, kind = self.game, self.overlays, self.shown, self.overlay.value
        step = game.steps[t]
        if kind == NO_OVERLAY:
            pictures = [step.png] * len(self.pictures)
        else:
            if not overlays.is_ready(kind, t) and not during_play:
                self._set_pictures([step.png] * len(self.pictures))
            pictures = [step.png] * len(self.pictures)
            count = len(pictures)
            try:
                # If the user has gone to another step while earlier maps were computed, this map is not needed.
                pictures = await self.compute(
                    lambda: [overlays.picture(kind, t, k) for k in range(count)] if t == self.shown else []
                )
            except (UserError, RunError) as error:
                self.message.text = printable(str(error))
            if t != self.shown or not pictures:
                return
        self._set_pictures(pictures)
        last = max(1, len(game.steps) - 1)
        if self.position.props["max"] != last:
            self.position.props["max"] = last
        self.position.set_value(t)
        end = " · the game is over" if game.is_over and t == len(game.steps) - 1 else ""
        changed = " · changed game" if game.is_changed else ""
        if self.keyboard is not None and self.keyboard.has_control:
            changed += " · you play (Esc: hand back)"
        self.step_text.text = f"step {t} of {len(game.steps) - 1}{changed}{end}"
        if not during_play or time.monotonic() - self.charts_drawn > CHART_SECONDS:
            self.charts_drawn = time.monotonic()
            self.output.draw(t)
            self.curves.draw(t)
        if not during_play:
            self.questions.show_step()

    def _set_pictures(self, pngs: list[bytes]) -> None:
        for picture, png in zip(self.pictures, pngs, strict=True):
            picture.set_source(f"data:image/png;base64,{base64.b64encode(png).decode()}")

    # --- events ---

    async def _on_slider(self, event: events.ValueChangeEventArguments) -> None:
        step = int(event.value or 0)
        if step != self.shown and not self.is_busy:
            self.is_playing = False
            await self.show(step)

    async def _on_overlay(self) -> None:
        ui.run_javascript(LEAVE_FOCUS)  # otherwise the arrow keys would belong to the list of overlays
        await self.show(self.shown)

    async def _seek(self, event: events.GenericEventArguments) -> None:
        x = await clicked_x(self.curves.value_chart, event)
        if x is not None:
            self.is_playing = False
            await self.show(round(x))

    # --- end ---

    def stop(self, reason: str) -> None:
        """Close the game and show the reason."""
        with contextlib.suppress(RuntimeError):  # the tab may have been closed
            self.message.text = reason
            self.body.clear()
        self.close()

    def close(self) -> None:
        """Free the environments."""
        self.is_playing = False
        self.is_closed = True
        if self in _open_games:
            _open_games.remove(self)
        game, self.game = self.game, None
        if game is not None:
            self.thread.submit(game.close)
        self.thread.shutdown(wait=False)


@app.on_shutdown
def _close_games() -> None:
    for page in list(_open_games):
        page.close()
