"""Commands that evaluate trained agents: `eval`, `video`, `compare` and `report`."""

from pathlib import Path
from typing import Any

from bestiary.cli.arguments import (
    Parser,
    add_game_limits,
    add_overwrite,
    add_playback_arguments,
    add_policy_arguments,
    add_run_argument,
    add_trust_code,
    parse_axis_range,
)
from bestiary.cli.playback_arguments import parse_with_env_options, select_checkpoint, select_replay
from bestiary.config.option_merging import expand_env_names
from bestiary.evaluation.learning_curves import DEFAULT_SMOOTH
from bestiary.runs.run import open_run
from bestiary.utils.console import note, print_line
from bestiary.utils.errors import UserError


def eval_command(argv: list[str]) -> None:
    """Play whole games with a trained agent or a scripted policy, and report the returns."""
    parser = Parser(
        "eval",
        "Play whole games with a trained agent, print the returns, and write them as JSON and CSV to the run folder. "
        "To play a scripted (hand-written) policy, give scripted:NAME instead of RUN.",
    )
    add_run_argument(parser)
    parser.add_argument(
        "--env",
        nargs="+",
        metavar="ENV",
        help="environments to play (default: the training environments); a scripted policy needs --env, for example: "
        "bestiary eval scripted:nearest --env warehouse",
    )
    parser.add_argument(
        "--levels",
        nargs="+",
        metavar="RANGE",
        help="ProcGen: ranges of levels to play; each range is reported separately, for example: 0:200 1000:1200",
    )
    parser.add_argument(
        "--checkpoints",
        choices=("all",),
        metavar="all",
        help="evaluate all checkpoints of the run and report them in one table",
    )
    parser.add_integer(
        "--episodes",
        "number of games for each task and each range of levels (default: 100; with --levels: one game per level, if "
        "the range has at most 1,000 levels)",
        low=1,
    )
    add_game_limits(parser)
    parser.add_integer(
        "--reset-state-every",
        "reset the recurrent state every N steps, even in the middle of a game; 0: use the sequence length of the "
        "training (--rollout-length, or --algo.sequence-length with PPO) (default: reset only when an episode starts)",
        metavar="N",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="save the actions of all games in recordings/ of the run folder, for bestiary video --replay",
    )
    add_policy_arguments(parser)
    a, run, env_options = parse_with_env_options(parser, argv)

    from bestiary.evaluation.evaluate import evaluate, evaluate_scripted_policy
    from bestiary.evaluation.result_tables import print_evaluation

    limits = {"seed": a.seed, "num_envs": a.num_envs, "max_steps": a.max_steps}
    if run is None:
        _check_scripted_arguments(a)
        name = a.run.removeprefix("scripted:")
        print_evaluation(evaluate_scripted_policy(name, a.env[0], env_options, episodes=a.episodes or 100, **limits))
        return
    if "levels" in env_options:
        raise UserError(f"--env.levels {env_options['levels']}: use --levels to choose the levels to evaluate")
    if a.checkpoint and a.checkpoints:
        raise UserError("--checkpoint cannot be combined with --checkpoints all; remove one of them")
    evaluation = evaluate(
        run.with_env_options(env_options),
        checkpoint=select_checkpoint(a.checkpoint, run),
        every_checkpoint=a.checkpoints == "all",
        env=expand_env_names(a.env or ()),
        levels=a.levels or (),
        greedy=a.greedy,
        episodes=a.episodes,
        reset_state_every=a.reset_state_every,
        record=a.record,
        **limits,
    )
    print_evaluation(evaluation)


def _check_scripted_arguments(a: Any) -> None:
    """Raise UserError if `eval` gets several environments, or options that a scripted policy does not support."""
    given = {
        "--greedy": a.greedy,
        "--sample": a.sample,
        "--checkpoint": a.checkpoint,
        "--checkpoints": a.checkpoints,
        "--levels": a.levels,
        "--reset-state-every": a.reset_state_every is not None,
        "--record": a.record,
        "--trust-code": a.trust_code,
    }
    if flags := [flag for flag, is_given in given.items() if is_given]:
        raise UserError(f"{a.run}: a scripted policy does not support these options; remove {', '.join(flags)}")
    if len(a.env) > 1:
        raise UserError(f"--env {' '.join(a.env)}: a scripted policy plays only one environment; give only one")


def video_command(argv: list[str]) -> None:
    """Record a video of one agent, or of several agents side by side."""
    parser = Parser(
        "video",
        "Record a video (GIF or MP4) of a game, drawn by the environment, or show the game on the screen. Several runs "
        "are shown side by side.",
    )
    add_run_argument(parser, several=True)
    parser.add_argument(
        "--show",
        action="store_true",
        help="show the game in a window while the agent plays; Escape closes the window. A video is written only if "
        "--out is given or if there is no display",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="output file, .gif or .mp4 (default: a new file in videos/ of the run folder)"
    )
    parser.add_integer(
        "--length", "maximum number of steps to record (default: 2,000, or 200 with --saliency)", low=1, metavar="STEPS"
    )
    add_playback_arguments(parser)
    parser.add_argument("--attention", action="store_true", help="draw the attention map of the agent over the frames")
    parser.add_argument(
        "--saliency",
        action="store_true",
        help="draw the saliency of each agent over its panel: the image regions that influence its policy and value",
    )
    parser.add_integer(
        "--density",
        "with --saliency: distance between neighbouring image patches that are blurred one by one, in pixels (default: "
        "4 for images of 84x84 pixels; scaled with the image size)",
        low=1,
        metavar="PIXELS",
    )
    parser.add_argument(
        "--same-actions",
        action="store_true",
        help="with --saliency: all panels show one game, which the first agent plays and the other agents only observe",
    )
    add_policy_arguments(parser)
    if scripted := [word for word in argv if word.startswith("scripted:")]:
        raise UserError(f"{scripted[0]}: video needs a trained agent; only bestiary eval supports scripted policies")
    a, first, env_options = parse_with_env_options(parser, argv)
    runs = [first, *(open_run(word, a.trust_code) for word in a.run[1:])]
    side_by_side = len(runs) > 1 or a.saliency
    if a.density is not None and not a.saliency:
        raise UserError(f"--density {a.density}: needs --saliency; add --saliency or remove --density")
    if side_by_side and a.attention:
        raise UserError(
            "--attention: only for one run and without --saliency; otherwise use bestiary look attention for each run"
        )
    if side_by_side and a.show:
        raise UserError("--show: only for one run and without --saliency; remove --show, and watch the written video")
    if a.same_actions and len(runs) == 1:
        raise UserError("--same-actions: needs at least two runs; add a run or remove --same-actions")
    if side_by_side and a.out is None:
        raise UserError("--out is required for several runs or --saliency; for example: --out compare.gif")

    from bestiary.evaluation.playback import PlaybackOptions
    from bestiary.evaluation.video import record_video, show_game
    from bestiary.evaluation.window import display_problem
    from bestiary.interpretability.attention import attention_overlay
    from bestiary.interpretability.side_by_side import record_side_by_side

    checkpoints = [select_checkpoint(a.checkpoint, run) for run in runs]
    playback = PlaybackOptions(
        length=a.length or (200 if a.saliency else 2_000),
        checkpoint=checkpoints[0],
        env=a.env,
        greedy=a.greedy,
        seed=a.seed,
        replay=select_replay(a),
        fps=a.fps or 0,
    )
    runs = [run.with_env_options(env_options) for run in runs]
    path: Path | None
    if side_by_side:
        path = record_side_by_side(
            runs,
            playback,
            out=a.out,
            overwrite=a.overwrite,
            same_actions=a.same_actions,
            saliency=a.saliency,
            density=a.density,
            checkpoints=checkpoints,
        )
    else:
        problem = display_problem() if a.show else None
        if problem is not None:
            note(f"note: --show: {problem}; a video is written instead")
        show = show_game if a.show and problem is None else record_video
        make_overlay = attention_overlay if a.attention else None
        path = show(runs[0], playback, out=a.out, overwrite=a.overwrite, make_overlay=make_overlay)
    if path is not None:
        print_line(f"video: {path}")


def compare_command(argv: list[str]) -> None:
    """Plot the learning curves of runs and print a table."""
    parser = Parser(
        "compare",
        "Plot the learning curves of runs and print a table. Runs that differ only in their seed are drawn as one "
        "mean curve with a band from the lowest to the highest return over the seeds. Aggregate scores over tasks and "
        "probabilities of improvement are also computed (see docs/statistics.md).",
    )
    add_run_argument(parser, several=True)
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="curves.png",
        help="output file of the figure (.png, .svg or .pdf); a CSV file with the data is written next to it (default: "
        "curves.png)",
    )
    parser.add_argument(
        "--axis", choices=("steps", "minutes"), default="steps", help="quantity on the x axis (default: steps)"
    )
    parser.add_argument(
        "--by",
        choices=("task",),
        help="draw one panel per task, with the steps of this task on the x axis; always on if a run has several tasks",
    )
    parser.add_argument(
        "--zoom", metavar="LOW:HIGH", help="add a panel that shows this range of the x axis, for example 2M:4M"
    )
    parser.add_integer(
        "--smooth",
        "number of games whose mean return is drawn at each point of a curve: the most recent games that had ended by "
        "this point; 0: draw each game as a point, and write single games to the CSV file",
        default=DEFAULT_SMOOTH,
        metavar="GAMES",
    )
    parser.add_argument(
        "--label",
        nargs="+",
        metavar="NAME",
        default=[],
        help="names of the groups of runs in figures and tables, one per group, in the order of the first run of each "
        "group (default: the options in which the groups differ)",
    )
    add_overwrite(parser)
    a = parser.parse_strictly(argv)
    zoom = parse_axis_range("--zoom", a.zoom) if a.zoom is not None else None

    from bestiary.evaluation.compare import compare_runs

    compare_runs(
        [open_run(word, a.trust_code) for word in a.run],
        Path(a.out),
        axis=a.axis,
        by_task=a.by == "task",
        zoom=zoom,
        smooth=a.smooth,
        names=a.label,
        overwrite=a.overwrite,
    )


def report_command(argv: list[str]) -> None:
    """Write an HTML page about all runs below a folder."""
    parser = Parser(
        "report",
        "Write an HTML page about all runs below a folder: table, learning curves, videos, saliency images and "
        "evaluations. The file contains all images and videos.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder that contains run folders, for example runs")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="output file (default: report.html)")
    parser.add_argument(
        "--no-draw",
        action="store_true",
        help="show existing videos and saliency images, but do not create missing files",
    )
    add_trust_code(parser)
    add_overwrite(parser)
    a = parser.parse_strictly(argv)

    from bestiary.studies.folder_report import write_folder_report

    path = write_folder_report(
        Path(a.folder), Path(a.out), draw_missing=not a.no_draw, trust_code=a.trust_code, overwrite=a.overwrite
    )
    print_line(f"report: {path}")
