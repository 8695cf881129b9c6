"""The choice of a game in the player: the parameters of the URL and the form that changes them."""

from dataclasses import dataclass

from nicegui import ui

from bestiary.evaluation.playback import PlaybackOptions
from bestiary.evaluation.run_outputs import output_files
from bestiary.runs.recordings import open_recording
from bestiary.runs.run import Run
from bestiary.utils.console import printable
from bestiary.utils.errors import UserError
from bestiary.view.catalogue import Catalogue
from bestiary.view.game import GameSetup
from bestiary.view.page_elements import page_url

NO_RUN = "none"
POLICIES = ("sampled", "greedy")


@dataclass(frozen=True)
class PlayerQuery:
    """The parameters in the URL of the page."""

    run: str
    checkpoint: int | None = None
    env: str | None = None
    seed: int = 0
    policy: str = "sampled"
    levels: str | None = None
    second: str | None = None  # key of the run of the second agent
    second_checkpoint: int | None = None
    recording: str | None = None  # name of the file in recordings/ that is replayed; None: a new game
    game: int = 0  # number of the game in the recording
    step: int = 0  # step that is shown first

    def url(self) -> str:
        """Return the URL of the page with these parameters."""
        shown = {name: value for name, value in vars(self).items() if value not in (None, "", 0) or name == "run"}
        return page_url("player", **shown)


def make_setup(catalogue: Catalogue, query: PlayerQuery) -> GameSetup:
    """Return the choices of a game. Raise UserError if they are not possible."""
    run = catalogue.run(query.run)
    if query.levels:
        run = run.with_env_options({"levels": query.levels})
    replay = None
    if query.recording is not None:
        paths = [path for path in output_files(run, "recordings") if path.name == query.recording]
        if not paths:
            raise UserError(f"{query.recording}: there is no such recording in recordings/ of the run")
        recording = open_recording(paths[0])
        replay = (recording, recording.game(query.game))
    options = PlaybackOptions(
        checkpoint=query.checkpoint,
        env=query.env,
        seed=query.seed,
        greedy=query.policy == "greedy",
        replay=replay,
    )
    others: list[tuple[Run, int | None]] = []
    if query.second is not None and query.second in catalogue.runs:
        others.append((catalogue.run(query.second), query.second_checkpoint))
    return GameSetup(run, options, others)


class GameChoice:
    """The form in which the user chooses the game: checkpoint, task, seed, policy, levels and second agent."""

    def __init__(self, catalogue: Catalogue, query: PlayerQuery):
        """Add the elements of the form to the page. At first, they show the parameters of the URL."""
        self.catalogue = catalogue
        self.query = query
        options = self.catalogue.options(query.run)
        names = [str(name) for name in options.get("env", [])]
        with ui.element("div").classes("controls"):
            self.checkpoint = ui.select({None: "newest"}, value=None, label="Checkpoint").props("dense")
            self._offer_checkpoints(self.checkpoint, query.run, query.checkpoint)
            self.env = ui.select(
                {k: printable(name) for k, name in enumerate(names)} or {0: ""}, value=0, label="Task"
            ).props("dense")
            if query.env in names:
                self.env.value = names.index(query.env)
            self.env.set_visibility(len(names) > 1)
            self.seed = ui.number("Seed", value=query.seed, min=0, precision=0).props("dense").classes("seed")
            self.policy = ui.select(list(POLICIES), value=query.policy, label="Actions").props("dense")
            self.levels = ui.input("Levels", value=query.levels or "").props("dense")
            self.levels.set_visibility("env.levels" in options)
            others = sorted(self.catalogue.runs, key=lambda key: key != query.run)  # the run of the page comes first
            second = query.second if query.second in others else NO_RUN
            self.second = ui.select([NO_RUN, *others], value=second, label="Second agent", with_input=True)
            self.second.props("dense").classes("second")
            self.second_checkpoint = ui.select({None: "newest"}, value=None, label="Its checkpoint").props("dense")
            self._show_second_checkpoints(query.second_checkpoint)
            self.second.on_value_change(lambda: self._show_second_checkpoints(None))
            ui.button("New game", on_click=self._open_chosen).props("outline dense no-caps").classes("new-game")
        if query.recording is not None:
            ui.label(f"Recorded game {query.game} of {printable(query.recording)}").classes("muted")

    def _offer_checkpoints(self, select: ui.select, key: str, wanted: int | None) -> None:
        """Offer the checkpoints of a run, and choose the one that is nearest to the wanted number of steps."""
        saved = [checkpoint.steps for checkpoint in self.catalogue.run(key).checkpoints]
        chosen = None if wanted is None or not saved else min(saved, key=lambda steps: abs(steps - wanted))
        select.set_options({None: "newest"} | {steps: f"{steps:,}" for steps in reversed(saved)}, value=chosen)

    def _show_second_checkpoints(self, wanted: int | None) -> None:
        key = self.second.value
        self.second_checkpoint.set_visibility(key in self.catalogue.runs)
        if key in self.catalogue.runs:
            self._offer_checkpoints(self.second_checkpoint, str(key), wanted)

    def _open_chosen(self) -> None:
        """Open the page again with the chosen options, so that its URL describes the game."""
        names = self.catalogue.options(self.query.run).get("env", [])
        chosen = PlayerQuery(
            run=self.query.run,
            checkpoint=self.checkpoint.value,
            env=names[self.env.value] if len(names) > 1 else None,
            seed=int(self.seed.value or 0),
            policy=self.policy.value,
            levels=self.levels.value or None,
            second=None if self.second.value == NO_RUN else self.second.value,
            second_checkpoint=None if self.second.value == NO_RUN else self.second_checkpoint.value,
        )
        ui.navigate.to(chosen.url())
