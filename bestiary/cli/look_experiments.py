"""Tools of the command `look` that play many games and test what an agent uses: `interventions` and `probes`."""

from typing import Any

from bestiary.cli.arguments import (
    Parser,
    add_game_limits,
    add_overwrite,
    add_policy_arguments,
    add_run_argument,
    add_task,
)
from bestiary.cli.playback_arguments import parse_with_env_options, select_checkpoint
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError


def look_interventions(argv: list[str]) -> None:
    """Erase and move objects in many games, and report the mean effect and its rank correlation with saliency."""
    parser = Parser(
        "look interventions",
        "Erase or move each object that the agent observes, at many steps of many games. Report the mean effect on the "
        "policy and the value with 95 % intervals over games, and the rank correlation with the saliency at the same "
        "places. Write a figure and two CSV files.",
    )
    _add_arguments(parser, episodes=10, every=50)
    parser.add_argument(
        "--objects",
        choices=("auto", "labels", "changes", "items"),
        default="auto",
        help="how objects are found: labels (positions in the RAM of the game), changes (regions that differ from the "
        "median image of the games) or items (warehouse) (default: auto: the first of labels, items and changes that "
        "the environment supports)",
    )
    a, run, env_options = parse_with_env_options(parser, argv)
    run = _require_run(run, a)

    from bestiary.interpretability.intervention_study import study_interventions

    study_interventions(
        run.with_env_options(env_options),
        checkpoint=select_checkpoint(a.checkpoint, run),
        env=a.env,
        sampling=_sampling_options(a),
        objects=a.objects,
        out=a.out,
        overwrite=a.overwrite,
    )


def look_probes(argv: list[str]) -> None:
    """Fit linear probes to the layers of an agent, and report their accuracy on held-out games."""
    parser = Parser(
        "look probes",
        "Predict labelled quantities, for example the position of the ball, linearly from each layer and from the "
        "recurrent state of an agent. Report R2 on held-out games. For comparison, also report R2 of an untrained "
        "network of the same architecture and of the observation itself. Write a figure and a CSV file.",
    )
    _add_arguments(parser, episodes=20, every=25)
    a, run, env_options = parse_with_env_options(parser, argv)
    run = _require_run(run, a)
    if a.episodes < 2:
        raise UserError(f"--episodes {a.episodes}: probes need one game to fit and one held-out game; use 2 or more")

    from bestiary.interpretability.probe_report import probe_run

    probe_run(
        run.with_env_options(env_options),
        checkpoint=select_checkpoint(a.checkpoint, run),
        env=a.env,
        sampling=_sampling_options(a),
        out=a.out,
        overwrite=a.overwrite,
    )


def _add_arguments(parser: Parser, episodes: int, every: int) -> None:
    add_run_argument(parser)
    parser.add_integer("--episodes", "number of games", default=episodes, low=1)
    parser.add_integer(
        "--every",
        "in each game, every STEPS-th step is measured; the first measured step is drawn at random",
        default=every,
        low=1,
        metavar="STEPS",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="output file of the figure (.png, .svg or .pdf); CSV files with the data are written next to it (default: "
        "a new file in interpretability/ of the run folder)",
    )
    add_overwrite(parser)
    add_task(parser)
    add_game_limits(parser, num_envs=16)
    add_policy_arguments(parser)


def _require_run(run: Run | None, a: Any) -> Run:
    if run is None:
        raise UserError(f"{a.run}: a scripted policy has no network to inspect; give a run folder")
    return run


def _sampling_options(a: Any) -> Any:
    from bestiary.interpretability.sampled_steps import SamplingOptions

    return SamplingOptions(a.episodes, a.every, a.greedy, a.seed, a.num_envs, a.max_steps)
