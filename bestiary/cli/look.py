"""Command `look`: the interpretability tools (saliency, attention, filters, actions)."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.cli.arguments import (
    Parser,
    add_game_limits,
    add_overwrite,
    add_playback_arguments,
    add_policy_arguments,
    add_run_argument,
    parse_number,
)
from bestiary.cli.look_experiments import look_interventions, look_probes
from bestiary.cli.playback_arguments import parse_with_env_options, select_checkpoint, select_replay
from bestiary.runs.run import Run, open_run
from bestiary.utils.console import print_line
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest

if TYPE_CHECKING:
    from bestiary.evaluation.playback import PlaybackOptions

MIN_CKA_FRAMES = 4  # minimum value of --frames, apart from 0


def look(argv: list[str]) -> None:
    """Run an interpretability tool. The first argument is the name of the tool."""
    if not argv:
        raise UserError(
            f"look: no tool given; expected one of {', '.join(TOOLS)}, for example: bestiary look saliency RUN"
        )
    name, rest = argv[0], argv[1:]
    if name in ("-h", "--help"):
        print("usage: bestiary look TOOL RUN [RUN ...] [options]\n")
        print("\n".join(f"  {name:<15}{description}" for name, (_, description) in TOOLS.items()))
        print("\nHelp on a tool: bestiary look TOOL --help")
        return
    if name not in TOOLS:
        raise UserError(f"look {name}: unknown tool; expected one of {', '.join(TOOLS)}{suggest(name, TOOLS)}")
    TOOLS[name][0](rest)


def _saliency(argv: list[str]) -> None:
    from bestiary.interpretability.saliency import PRESETS, SaliencyOptions
    from bestiary.interpretability.saliency_video import OUTPUTS, PALETTES, SaliencyStyle, render_saliency

    parser = Parser(
        "look saliency",
        "Draw the perturbation saliency of an agent over a game. Image regions are coloured if blurring them changes "
        "the policy (red) or the value (green) of the agent.",
    )
    add_run_argument(parser)
    _add_game_arguments(parser, "output file, .gif, .mp4 or .png; the saliency scores are written next to it as .npz")
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default="torchbeast-popart",
        help="published values of --density and --radius, scaled to the size of the image: greydanus (5 and 5 pixels "
        "for images of 80x80) or torchbeast-popart (2 and 2 pixels for images of 84x84) (default: torchbeast-popart)",
    )
    parser.add_integer(
        "--density",
        "distance between neighbouring image patches that are blurred one by one, in pixels (default: value of "
        "--preset)",
        low=1,
        metavar="PIXELS",
    )
    parser.add_float(
        "--radius",
        "radius of a patch, in pixels (default: value of --preset)",
        low=0.1,
        high=100,
        metavar="PIXELS",
    )
    parser.add_argument(
        "--output",
        choices=sorted(OUTPUTS),
        default="both",
        help="draw the saliency of the policy, of the value, or both (default: both)",
    )
    parser.add_argument(
        "--mode",
        choices=("occlude", "searchlight"),
        default="occlude",
        help="what is blurred: the patch (occlude), or everything except the patch (searchlight) (default: occlude)",
    )
    parser.add_argument(
        "--distance",
        choices=("logits", "kl"),
        default="logits",
        help="how the change of the policy is measured: half the squared distance between the logits (logits), or "
        "the KL divergence (kl) (default: logits)",
    )
    parser.add_argument(
        "--scale",
        choices=("absolute", "quantile"),
        default="absolute",
        help="absolute: one colour scale for all frames; quantile: in each frame, colour only the highest 10 %% of the "
        "scores (default: absolute)",
    )
    parser.add_argument(
        "--colors",
        choices=sorted(PALETTES),
        default="red-green",
        help="colours of policy and value (default: red-green)",
    )
    parser.add_argument(
        "--full",
        nargs=2,
        metavar=("POLICY", "VALUE"),
        help="with --scale absolute: policy score and value score that are drawn in full colour; to compare several "
        "videos, use the same two numbers for all of them (default: the 95th percentile, over all frames, of the "
        "highest score of a frame)",
    )
    add_policy_arguments(parser)
    a, run, env_options = parse_with_env_options(parser, argv)
    run = _require_agent(run, a).with_env_options(env_options)
    full: tuple[float | None, float | None] = (None, None)
    if a.full:
        limits = {"low": 0, "high": 1e12}
        full = (parse_number("--full", float, limits, a.full[0]), parse_number("--full", float, limits, a.full[1]))
    written = render_saliency(
        run,
        _playback_options(a, run),
        out=a.out,
        overwrite=a.overwrite,
        saliency_options=SaliencyOptions(a.density, a.radius, a.mode, a.distance, a.preset),
        style=SaliencyStyle(a.output, a.scale, a.colors, full),
    )
    print_line(f"saliency: {_describe_paths(written)}")


def _attention(argv: list[str]) -> None:
    parser = Parser(
        "look attention",
        "Draw a game and, next to it, the attention map of each attention head. Only for agents with attention.",
    )
    add_run_argument(parser)
    _add_game_arguments(parser, "output file, .gif, .mp4 or .png; the attention weights are written next to it as .npz")
    add_policy_arguments(parser)
    a, run, env_options = parse_with_env_options(parser, argv)
    run = _require_agent(run, a).with_env_options(env_options)

    from bestiary.interpretability.attention import render_attention

    written = render_attention(run, _playback_options(a, run), out=a.out, overwrite=a.overwrite)
    print_line(f"attention: {_describe_paths(written)}")


def _actions(argv: list[str]) -> None:
    parser = Parser(
        "look actions",
        "Plot how often agents choose each action, with the standard deviation over games. Also write a CSV file.",
    )
    add_run_argument(parser, several=True)
    _add_figure_arguments(parser, "actions.png")
    parser.add_integer("--episodes", "number of games per task", default=50, low=1)
    add_game_limits(parser)
    add_policy_arguments(parser)
    a, first, env_options = parse_with_env_options(parser, argv)
    runs = [_require_agent(first, a), *(open_run(word, a.trust_code) for word in a.run[1:])]

    from bestiary.interpretability.action_statistics import measure_actions

    measure_actions(
        [run.with_env_options(env_options) for run in runs],
        out=_figure_path(a, runs, "actions.png"),
        episodes=a.episodes,
        checkpoint_steps=[select_checkpoint(a.checkpoint, run) for run in runs],
        greedy=a.greedy,
        seed=a.seed,
        num_envs=a.num_envs,
        max_steps=a.max_steps,
        overwrite=a.overwrite,
    )


def _filters(argv: list[str]) -> None:
    from bestiary.interpretability.activation_maximisation import maximise_activations
    from bestiary.interpretability.filter_comparison import compare_filters
    from bestiary.interpretability.layer_similarity import MATCHINGS

    parser = Parser(
        "look filters",
        "Compare the convolution layers of agents at several checkpoints; write a figure and a CSV file. The layers "
        "are compared in two ways: by the distance between their weights and by the similarity of their outputs (CKA). "
        "With --draw, draw instead, for each filter of a layer, the image that activates it most.",
    )
    add_run_argument(parser, several=True)
    _add_figure_arguments(parser, "filters.png")
    parser.add_integer("--points", "maximum number of checkpoints per run, evenly spaced", default=10, low=1)
    parser.add_argument(
        "--match",
        choices=MATCHINGS,
        default="index",
        help="how the weights of two layers are paired for the distance: index (kernels with the same index), optimal "
        "(the pairing of kernels with the smallest total distance) or filters (the pairing of whole filters with the "
        "smallest total distance) (default: index)",
    )
    parser.add_argument(
        "--between",
        choices=("runs", "time"),
        default="runs",
        help="runs: compare each run with the first run; time: compare each checkpoint with the next "
        "checkpoint of the same run (default: runs)",
    )
    parser.add_integer(
        "--frames", "number of game frames that are used to compute CKA; 0: do not compute CKA", default=256
    )
    parser.add_integer(
        "--seed", "random seed of the game that is played for CKA, or of the initial images of --draw", default=0
    )
    parser.add_argument(
        "--draw",
        metavar="LAYER",
        help="for each filter of this layer, draw the image that activates it most (.png); only for one run",
    )
    a = parser.parse_strictly(argv)
    runs = [open_run(word, a.trust_code) for word in a.run]
    if a.draw is not None:
        if len(runs) > 1:
            raise UserError(f"--draw {a.draw}: needs exactly one run, but {len(runs)} are given")
        path = maximise_activations(runs[0], a.draw, out=a.out, seed=a.seed, overwrite=a.overwrite)
        print_line(f"filters: {path}")
        return
    if 0 < a.frames < MIN_CKA_FRAMES:
        raise UserError(f"--frames {a.frames}: CKA needs at least {MIN_CKA_FRAMES} frames; use 0 to compute no CKA")
    compare_filters(
        runs,
        out=_figure_path(a, runs, "filters.png"),
        points=a.points,
        match=a.match,
        between=a.between,
        frames=a.frames,
        seed=a.seed,
        overwrite=a.overwrite,
    )


def _add_figure_arguments(parser: Parser, name: str) -> None:
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="output file of the figure (.png, .svg or .pdf); a CSV file with the data is written next to it (default: "
        f"a new file in the run folder, or {name} if there are several runs)",
    )
    add_overwrite(parser)


def _figure_path(a: Any, runs: list[Run], name: str) -> str | None:
    """Return the path of the figure: the value of --out or, for several runs, `name`.

    Return None for one run without --out: the figure then becomes a new file in the run folder.
    """
    return a.out or (name if len(runs) > 1 else None)


def _add_game_arguments(parser: Parser, files: str) -> None:
    """Add the arguments of tools that draw on the frames of a game. `files` is the start of the help text of --out."""
    parser.add_argument(
        "--out", metavar="FILE", help=f"{files} (default: a new file in interpretability/ of the run folder)"
    )
    parser.add_integer("--start", "step of the game at which drawing starts", default=0, metavar="STEP")
    parser.add_integer("--length", "maximum number of steps to draw", default=300, low=1, metavar="STEPS")
    add_playback_arguments(parser)


def _playback_options(a: Any, run: Run) -> "PlaybackOptions":
    from bestiary.evaluation.playback import PlaybackOptions

    return PlaybackOptions(
        length=a.length,
        start=a.start,
        checkpoint=select_checkpoint(a.checkpoint, run),
        env=a.env,
        greedy=a.greedy,
        seed=a.seed,
        replay=select_replay(a),
        fps=a.fps or 0,
    )


def _describe_paths(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"


def _require_agent(run: Run | None, a: Any) -> Run:
    """Return the run. Raise UserError if `run` is None: the user has then given a scripted policy instead of a run."""
    if run is None:
        name = a.run if isinstance(a.run, str) else a.run[0]
        raise UserError(f"{name}: a scripted policy has no network to inspect; give a run folder")
    return run


TOOLS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "saliency": (_saliency, "mark the image regions that influence the policy or the value of an agent"),
    "attention": (_attention, "draw the attention maps of agents with attention"),
    "filters": (
        _filters,
        "compare the convolution layers of agents at several checkpoints, or draw what activates their filters most",
    ),
    "actions": (_actions, "plot how often agents choose each action"),
    "interventions": (look_interventions, "erase and move objects, and compare the effect with the saliency"),
    "probes": (look_probes, "measure which layers represent positions of objects and other labelled quantities"),
}
