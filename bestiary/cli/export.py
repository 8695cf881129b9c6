"""Commands that write files for other programs and people: `export` and `card`."""

from typing import Any

from bestiary.cli.arguments import (
    Parser,
    add_overwrite,
    add_policy_arguments,
    add_run_argument,
    add_task,
)
from bestiary.cli.playback_arguments import parse_with_env_options, select_checkpoint
from bestiary.runs.run import open_run
from bestiary.utils.console import print_line
from bestiary.utils.errors import UserError

PLAYING = ("--env", "--greedy", "--sample", "--seed")  # options of formats that contain games of the agent
# Format -> the options that it supports. Options that all formats support are not listed.
FORMAT_OPTIONS = {
    "npz": ("--rollouts", "--length", "--out", *PLAYING),
    "minari": ("--episodes", "--dataset", *PLAYING),
    "onnx": ("--out",),
    "torch": ("--out",),
}


def export_command(argv: list[str]) -> None:
    """Save a trained agent, or games that it plays, for other programs."""
    parser = Parser(
        "export",
        "Save a trained agent as an ONNX file or as a program of torch.export, or play with it and save the games as "
        "NumPy arrays or as a Minari dataset.",
    )
    add_run_argument(parser)
    parser.add_argument(
        "--format",
        choices=tuple(FORMAT_OPTIONS),
        default="npz",
        help="npz: rollouts (observations, actions, log-probabilities, values, rewards) as NumPy arrays; minari: whole "
        "episodes as a Minari dataset; onnx: the agent as an ONNX file; torch: the agent as a program of torch.export "
        "(default: npz)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="output file, .npz, .onnx or .pt2 (default: a new file in rollouts/ or exports/ of the run folder)",
    )
    parser.add_integer(
        "--rollouts", "npz: number of rollouts; each rollout is played in its own environment (default: 20)", low=1
    )
    parser.add_integer("--length", "npz: length of each rollout, in steps (default: 500)", low=1, metavar="STEPS")
    parser.add_integer("--episodes", "minari: number of episodes (default: 100)", low=1)
    parser.add_argument(
        "--dataset",
        metavar="ID",
        help="minari: ID of the dataset, for example pong/expert-v0 (default: bestiary/RUN/ENV-STEPS-POLICY-v0); "
        "Minari stores datasets in ~/.minari/datasets or in the folder of the variable MINARI_DATASETS_PATH",
    )
    add_overwrite(parser)
    add_task(parser)
    add_policy_arguments(parser)
    a, run, env_options = parse_with_env_options(parser, argv)
    if run is None:
        raise UserError(f"{a.run}: export needs a trained agent; only bestiary eval supports scripted policies")
    _check_format_options(a, env_options)
    checkpoint = select_checkpoint(a.checkpoint, run)
    if a.format in ("onnx", "torch"):
        from bestiary.evaluation.agent_export import export_onnx, export_torch

        export = export_onnx if a.format == "onnx" else export_torch
        print_line(f"agent: {export(run, out=a.out, checkpoint=checkpoint, overwrite=a.overwrite)}")
        return
    run = run.with_env_options(env_options)
    playing: dict[str, Any] = {"checkpoint": checkpoint, "greedy": a.greedy, "seed": a.seed, "env": a.env}
    if a.format == "minari":
        from bestiary.evaluation.minari_export import export_minari

        dataset = export_minari(run, dataset=a.dataset, episodes=a.episodes or 100, overwrite=a.overwrite, **playing)
        print_line(f"dataset: {dataset}")
        return

    from bestiary.evaluation.export import export_rollouts

    path = export_rollouts(
        run, out=a.out, rollouts=a.rollouts or 20, length=a.length or 500, overwrite=a.overwrite, **playing
    )
    print_line(f"rollouts: {path}")


def _check_format_options(a: Any, env_options: dict[str, Any]) -> None:
    """Raise UserError if an option is given that has no effect with the chosen format."""
    given = {
        "--out": a.out,
        "--rollouts": a.rollouts,
        "--length": a.length,
        "--episodes": a.episodes,
        "--dataset": a.dataset,
        "--env": a.env,
        "--greedy": a.greedy,
        "--sample": a.sample,
        "--seed": a.seed,
    }
    problems = []
    for flag, value in given.items():
        if value and flag not in FORMAT_OPTIONS[a.format]:
            formats = " or ".join(name for name, flags in FORMAT_OPTIONS.items() if flag in flags)
            problems.append(f"{flag}: has no effect with --format {a.format}; remove it, or choose --format {formats}")
    if env_options and a.format in ("onnx", "torch"):
        flags = ", ".join(f"--env.{name.replace('_', '-')}" for name in env_options)
        problems.append(f"{flags}: has no effect with --format {a.format}, which exports only the agent; remove it")
    if problems:
        raise UserError(*problems)


def card_command(argv: list[str]) -> None:
    """Write a folder with a model card that can be published."""
    parser = Parser(
        "card",
        "Evaluate an agent, record a video, and write a folder that can be published, for example on the Hugging Face "
        "Hub: model card (README.md), weights, configuration, evaluation and video. The folder is a run folder, so all "
        "commands accept it.",
    )
    add_run_argument(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder to create (default: a new folder in cards/ of the run folder)"
    )
    parser.add_integer("--episodes", "number of games of the evaluation, per task", default=100, low=1)
    parser.add_argument("--no-video", action="store_true", help="do not record a video")
    add_overwrite(parser)
    add_policy_arguments(parser)
    a = parser.parse_strictly(argv)
    run = open_run(a.run, a.trust_code)
    checkpoint = select_checkpoint(a.checkpoint, run)

    from bestiary.evaluation.model_card import write_card

    folder = write_card(
        run,
        out=a.out,
        episodes=a.episodes,
        checkpoint=checkpoint,
        greedy=a.greedy,
        seed=a.seed,
        video=not a.no_video,
        overwrite=a.overwrite,
    )
    print_line(f"card: {folder}/README.md")
