"""`bestiary look WHAT RUN...`: the command lines of the lenses; each parses and calls one function of `analysis/`."""

from pathlib import Path
from typing import Any

from bestiary.arguments import (
    FPS,
    Parser,
    add_player,
    add_replay,
    add_run,
    command_parser,
    frame_rate,
    number,
    parse_with_env,
    quantity,
    which_checkpoint,
    which_replay,
)
from bestiary.errors import UserError


def _saliency(argv: list[str]) -> None:
    from bestiary.analysis.look_saliency import COLORS, OUTPUTS, Look, look_saliency
    from bestiary.analysis.saliency import Method

    parser = command_parser(
        "look saliency", "What would change the agent's mind, painted over a game: red its policy, green its value."
    )
    add_run(parser)
    _add_game(parser, "pong.gif, pong.mp4 or pong.png; pong.npz with the scores goes beside it", 300)
    parser.add_argument(
        "--density",
        metavar="INT",
        help="pixels from one patch to the next (default 2 of a picture of 84, others in proportion)",
    )
    parser.add_argument(
        "--radius", metavar="FLOAT", help="of a patch, in pixels (default 2 of a picture of 84, others in proportion)"
    )
    parser.add_argument("--output", choices=sorted(OUTPUTS), default="both", help="what is painted (default both)")
    parser.add_argument(
        "--mode",
        choices=("occlude", "searchlight"),
        default="occlude",
        help="blur the patch, or all but it (default occlude)",
    )
    parser.add_argument(
        "--distance",
        choices=("logits", "kl"),
        default="logits",
        help="between policies: of logits, squared and halved, or KL (default logits)",
    )
    parser.add_argument(
        "--scale",
        choices=("absolute", "quantile"),
        default="absolute",
        help="the same score has the same colour in all frames, or the highest tenth of each frame is coloured",
    )
    parser.add_argument("--colors", choices=sorted(COLORS), default="red-green", help="of policy and value")
    parser.add_argument(
        "--full",
        nargs=2,
        metavar=("POLICY", "VALUE"),
        help="scores at full colour, to compare movies (default: the 95th percentile of the frames' highest)",
    )
    add_player(parser)
    a, run, options = parse_with_env(parser, argv)
    run = _of_a_run(run, a).with_env(options)
    density = number("--density", a.density, 1) if a.density else None
    radius = quantity("--radius", a.radius, 0.1, 100) if a.radius else None
    full = tuple(quantity("--full", text, 0, 1e12) for text in a.full) if a.full else (None, None)
    written = look_saliency(
        run,
        method=Method(density, radius, a.mode, a.distance),
        look=Look(a.output, a.scale, a.colors, (full[0], full[1])),
        **_game(a, run),
    )
    print(f"saliency: {_named(written)}")


def _attention(argv: list[str]) -> None:
    from bestiary.analysis.look_attention import look_attention

    parser = command_parser("look attention", "A game, and beside it where each of the agent's heads looks.")
    add_run(parser)
    _add_game(parser, "attention.gif, .mp4 or .png; the weights go beside it as .npz", 300)
    add_player(parser)
    a, run, options = parse_with_env(parser, argv)
    run = _of_a_run(run, a).with_env(options)
    print(f"attention: {_named(look_attention(run, **_game(a, run)))}")


def _actions(argv: list[str]) -> None:
    from bestiary.analysis.actions import look_actions
    from bestiary.runs.folder import open_run

    parser = command_parser(
        "look actions", "How often agents do what: bars with their deviation over games, and a CSV."
    )
    add_run(parser, nargs="+")
    _add_figure(parser)
    parser.add_argument("--episodes", metavar="INT", default="50", help="games of each task (default 50)")
    parser.add_argument("--num-envs", metavar="INT", default="32", help="environments at once (default 32)")
    parser.add_argument("--max-steps", metavar="INT", default="27k", help="give a game up after so many (default 27k)")
    add_player(parser)
    a, first, options = parse_with_env(parser, argv)
    first = _of_a_run(first, a)
    runs = [first, *(open_run(word, a.trust_code) for word in a.run[1:])]
    look_actions(
        [run.with_env(options) for run in runs],
        out=_figure(a, runs, "actions.png"),
        episodes=number("--episodes", a.episodes, 1),
        at=[which_checkpoint(a.checkpoint, run) for run in runs],
        greedy=a.greedy,
        seed=number("--seed", a.seed),
        num_envs=number("--num-envs", a.num_envs, 1),
        max_steps=number("--max-steps", a.max_steps, 1),
        overwrite=a.overwrite,
    )


def _filters(argv: list[str]) -> None:
    from bestiary.analysis.drawings import draw_filters
    from bestiary.analysis.filters import MATCHES, look_filters
    from bestiary.runs.folder import open_run

    parser = command_parser(
        "look filters",
        "How far apart convolutions are over training: the first run and each other one, or each and itself.",
    )
    add_run(parser, nargs="+")
    _add_figure(parser)
    parser.add_argument(
        "--points", metavar="INT", default="10", help="checkpoints of each run, first to last (default 10)"
    )
    parser.add_argument(
        "--match",
        choices=MATCHES,
        default="index",
        help="which kernels belong together: by index, so that the distance is least, or so by whole filters",
    )
    parser.add_argument("--between", choices=("runs", "time"), default="runs", help="what is compared (default runs)")
    parser.add_argument("--frames", metavar="INT", default="256", help="for CKA, of a game (default 256; 0: no CKA)")
    parser.add_argument("--seed", metavar="INT", default="0", help="of that game (default 0)")
    parser.add_argument("--draw", metavar="LAYER", help="draw what excites each filter of a layer instead, as PNG")
    a = parser.parse_strictly(argv)
    runs = [open_run(word, a.trust_code) for word in a.run]
    if a.draw is not None:
        if len(runs) > 1:
            raise UserError(f"--draw {a.draw}: of one run at a time")
        drawn = draw_filters(runs[0], a.draw, out=a.out, seed=number("--seed", a.seed), overwrite=a.overwrite)
        print(f"drawings: {drawn}")
        return
    frames = number("--frames", a.frames)
    if 0 < frames < 4:
        raise UserError(f"--frames {frames}: so few align with anything; give more, or 0")
    look_filters(
        runs,
        out=_figure(a, runs, "filters.png"),
        points=number("--points", a.points, 1),
        match=a.match,
        between=a.between,
        frames=frames,
        seed=number("--seed", a.seed),
        overwrite=a.overwrite,
    )


def _add_figure(parser: Parser) -> None:
    parser.add_argument(
        "--out", metavar="FILE", help="figure, with a CSV beside it (default: in the run folder; of several runs, here)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")


def _figure(a: Any, runs: list[Any], name: str) -> str | None:
    return a.out or (name if len(runs) > 1 else None)


def _add_game(parser: Parser, files: str, length: int) -> None:
    """What lenses on a game have in common."""
    parser.add_argument("--out", metavar="FILE", help=f"{files} (default: in the run folder's looks/)")
    parser.add_argument("--start", metavar="STEPS", default="0", help="begin at this step of the game (default 0)")
    parser.add_argument(
        "--length", metavar="STEPS", default=str(length), help=f"at most so many steps (default {length})"
    )
    parser.add_argument("--fps", metavar="FLOAT", help=FPS)
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.add_argument("--env", metavar="ENV", help="which of several tasks (default: the first)")
    add_replay(parser)


def _game(a: Any, run: Any) -> dict[str, Any]:
    return {
        "out": a.out,
        "start": number("--start", a.start),
        "length": number("--length", a.length, 1),
        "checkpoint": which_checkpoint(a.checkpoint, run),
        "greedy": a.greedy,
        "seed": number("--seed", a.seed),
        "fps": frame_rate(a.fps) if a.fps else 0,
        "overwrite": a.overwrite,
        "env": a.env,
        "replay": which_replay(a),
    }


def _named(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"


def _of_a_run(run: Any, a: Any) -> Any:
    if run is None:
        named = a.run if isinstance(a.run, str) else a.run[0]
        raise UserError(f"{named}: a script has no inside to look into; name a run folder")
    return run


LENSES = {
    "saliency": (_saliency, "where a change of the picture would change policy or value"),
    "attention": (_attention, "where the heads of an agent with attention look"),
    "filters": (_filters, "how far apart the convolutions of agents are, over training"),
    "actions": (_actions, "how often agents do what"),
}
