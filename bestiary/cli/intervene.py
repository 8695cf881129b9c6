"""Command `intervene`: change what an agent observes or does at one step of a game, and report the effect."""

from functools import partial

from bestiary.cli.arguments import (
    Parser,
    add_overwrite,
    add_policy_arguments,
    add_replay,
    add_run_argument,
    add_task,
)
from bestiary.cli.playback_arguments import parse_with_env_options, select_checkpoint, select_replay
from bestiary.utils.errors import UserError

DEFAULT_CONTINUATION = 100  # default of --continue, in steps, with --set or --action; otherwise the default is 0
# Option -> (format of its value, help text).
KINDS = {
    "erase": (
        "X,Y,WIDTH,HEIGHT",
        "fill a rectangle of the observation with the median colour around it; X,Y is the upper left pixel; if the "
        "observation is a vector that describes a grid, the unit is a cell, and its entries become 0",
    ),
    "blur": ("X,Y,WIDTH,HEIGHT", "blur a rectangle of the observed image"),
    "move": (
        "X,Y,WIDTH,HEIGHT,TO_X,TO_Y",
        "move a rectangle of the observed image so that TO_X,TO_Y is its new upper left corner",
    ),
    "copy": (
        "X,Y,WIDTH,HEIGHT,TO_X,TO_Y",
        "copy a rectangle of the observed image so that TO_X,TO_Y is the upper left corner of the copy",
    ),
    "set": (
        "LABEL=VALUE",
        "change a labelled quantity of the game, for example ball_x=100 (docs/interventions.md lists them); Atari "
        "games need the package ale-py",
    ),
    "action": ("NAME", "take this action instead of the action of the agent"),
}


def intervene_command(argv: list[str]) -> None:
    """Apply interventions at one step of a game, and report how policy, value and game change."""
    parser = Parser(
        "intervene",
        "Play a game up to a step, change what the agent observes or does in this step, and report the probabilities "
        "of the actions and the value, without and with the change: as a table, a CSV file and a figure. Several "
        "changes are applied in the order in which they are given.",
    )
    add_run_argument(parser)
    parser.add_integer("--step", "step of the game at which the changes are applied", default=0, metavar="STEP")
    for kind, (metavar, help) in KINDS.items():
        parser.add_argument(
            f"--{kind}",
            dest="interventions",
            action="append",
            type=partial(_parse, kind),
            metavar=metavar,
            help=help,
        )
    parser.add_integer(
        "--continue",
        "number of further steps to play after the changes, once with and once without the changes (default: "
        f"{DEFAULT_CONTINUATION} with --set or --action, otherwise 0)",
        metavar="STEPS",
    )
    parser.add_argument(
        "--earlier-actions",
        metavar="STEP:NAME,...",
        help="actions that are taken before --step instead of those of the agent, for example 120:LEFT,130-145:RIGHT",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="output file of the figure (.png, .svg or .pdf); CSV files with the data are written next to it (default: "
        "a new file in interpretability/ of the run folder)",
    )
    add_overwrite(parser)
    add_task(parser)
    add_replay(parser)
    add_policy_arguments(parser)
    a, run, env_options = parse_with_env_options(parser, argv)
    if run is None:
        raise UserError(f"{a.run}: a scripted policy has no network to inspect; give a run folder")

    from bestiary.evaluation.playback import PlaybackOptions
    from bestiary.interpretability.game_branch import parse_earlier_actions
    from bestiary.interpretability.intervention_report import intervene
    from bestiary.interpretability.interventions import parse_intervention

    interventions = [parse_intervention(kind, text) for kind, text in a.interventions or ()]
    steps = getattr(a, "continue")
    if steps is None:
        steps = DEFAULT_CONTINUATION if any(one.kind in ("set", "action") for one in interventions) else 0
    options = PlaybackOptions(
        checkpoint=select_checkpoint(a.checkpoint, run),
        env=a.env,
        greedy=a.greedy,
        seed=a.seed,
        replay=select_replay(a),
    )
    intervene(
        run.with_env_options(env_options),
        options,
        a.step,
        interventions,
        continue_steps=steps,
        earlier_actions=parse_earlier_actions(a.earlier_actions) if a.earlier_actions else None,
        out=a.out,
        overwrite=a.overwrite,
    )


def _parse(kind: str, text: str) -> tuple[str, str]:
    """Return the option and its value. The values are parsed later, because this needs torch."""
    return kind, text
