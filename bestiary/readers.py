"""The commands that read run folders: eval, movie, audit, export, compare, report; each parses and calls one function of
`analysis/`. (`look` has several lenses, in `lenses.py`.)"""

from pathlib import Path

from bestiary.arguments import (
    FPS,
    add_player,
    add_replay,
    add_run,
    command_parser,
    frame_rate,
    number,
    parse_with_env,
    part_of_axis,
    which_checkpoint,
    which_replay,
)
from bestiary.errors import UserError


def _eval(argv: list[str]) -> None:
    from bestiary.analysis.evaluate import evaluate, evaluate_player
    from bestiary.resolve import env_names

    parser = command_parser("eval", "Play whole games with a trained agent; writes JSON and CSV into the run folder.")
    add_run(parser)
    parser.add_argument(
        "--env",
        nargs="+",
        metavar="ENV",
        help="what to play (default: what the run was trained on): eval scripted:nearest --env warehouse",
    )
    parser.add_argument(
        "--levels", nargs="+", metavar="RANGE", help="ProcGen: ranges of levels, a part each: 0:200 1000:1200"
    )
    parser.add_argument("--checkpoints", choices=("all",), metavar="all", help="every checkpoint, into one table")
    parser.add_argument(
        "--episodes",
        metavar="INT",
        help="whole games of each part (default 100; with --levels one a level, up to 1,000 levels)",
    )
    parser.add_argument("--num-envs", metavar="INT", default="32", help="environments at once (default 32)")
    parser.add_argument("--max-steps", metavar="INT", default="27k", help="give a game up after so many (default 27k)")
    parser.add_argument(
        "--carry",
        metavar="INT",
        help="the memory begins anew after so many steps, also within games (0: as many as an unroll of the training)",
    )
    parser.add_argument(
        "--record", action="store_true", help="write down every decision, for bestiary movie --replay (recordings/)"
    )
    add_player(parser)
    a, run, options = parse_with_env(parser, argv)
    numbers = {
        "seed": number("--seed", a.seed),
        "num_envs": number("--num-envs", a.num_envs, 1),
        "max_steps": number("--max-steps", a.max_steps, 1),
    }
    episodes = number("--episodes", a.episodes, 1) if a.episodes is not None else None
    if run is None:
        if a.greedy or a.sample or a.checkpoint or a.checkpoints or a.levels or a.trust_code or a.carry or a.record:
            raise UserError(
                f"{a.run}: --greedy, --sample, --checkpoint, --checkpoints, --levels, --carry, --record and --trust-code are "
                "for trained agents"
            )
        if len(a.env) > 1:
            raise UserError(f"--env {' '.join(a.env)}: a scripted player plays one environment at a time")
        evaluate_player(a.run.removeprefix("scripted:"), a.env[0], options, episodes=episodes or 100, **numbers).show()
        return
    if "levels" in options:
        raise UserError(f"--env.levels {options['levels']}: which levels to play is --levels here")
    if a.checkpoint and a.checkpoints:
        raise UserError("--checkpoint names one and --checkpoints all takes every one: choose")
    checkpoint = which_checkpoint(a.checkpoint, run)
    evaluate(
        run.with_env(options),
        checkpoint=checkpoint,
        every_checkpoint=a.checkpoints == "all",
        env=env_names(a.env or ()),
        levels=a.levels or (),
        greedy=a.greedy,
        episodes=episodes,
        carry=number("--carry", a.carry) if a.carry else None,
        record=a.record,
        **numbers,
    ).show()


def _movie(argv: list[str]) -> None:
    from bestiary.analysis.movie import film, film_together
    from bestiary.runs.folder import open_run

    parser = command_parser(
        "movie", "Film trained agents: the environment's own picture, as GIF or MP4; several side by side."
    )
    add_run(parser, nargs="+")
    parser.add_argument("--out", metavar="FILE", help="play.gif or play.mp4 (default: in the run folder's movies/)")
    parser.add_argument("--length", metavar="STEPS", help="at most so many steps (default 2000; with --saliency 200)")
    parser.add_argument("--fps", metavar="FLOAT", help=FPS)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--env", metavar="ENV", help="which of several tasks to film (default: the first)")
    parser.add_argument("--attention", action="store_true", help="draw where the agent looks over the picture")
    parser.add_argument(
        "--saliency", action="store_true", help="paint what would change the agent's mind, a panel each"
    )
    parser.add_argument(
        "--density", metavar="INT", help="saliency: pixels from one patch to the next (default 4 of 84)"
    )
    parser.add_argument(
        "--same-actions", action="store_true", help="one game, which the first agent plays and the others watch"
    )
    add_replay(parser)
    add_player(parser)
    if scripted := [word for word in argv if word.startswith("scripted:")]:
        raise UserError(f"{scripted[0]}: scripted players are evaluated (bestiary eval), not filmed")
    a, first, options = parse_with_env(parser, argv)
    if a.density and not a.saliency:
        raise UserError(f"--density {a.density}: is for --saliency")
    runs = [first, *(open_run(word, a.trust_code) for word in a.run[1:])]
    together = len(runs) > 1 or a.saliency
    if together and a.attention:
        raise UserError("--attention: of one agent, without --saliency; bestiary look attention shows every head")
    if a.same_actions and len(runs) == 1:
        raise UserError("--same-actions: needs two runs or more")
    if together and a.out is None:
        raise UserError("--out: where to? Several panels belong to no run folder: --out compare.gif")
    checkpoints = [which_checkpoint(a.checkpoint, run) for run in runs]
    common = {
        "greedy": a.greedy,
        "seed": number("--seed", a.seed),
        "fps": frame_rate(a.fps) if a.fps else 0,
        "overwrite": a.overwrite,
        "env": a.env,
        "replay": which_replay(a),
    }
    length = number("--length", a.length, 1) if a.length else None
    runs = [run.with_env(options) for run in runs]
    if together:
        path = film_together(
            runs,
            out=a.out,
            checkpoints=checkpoints,
            length=length,
            same_actions=a.same_actions,
            saliency=a.saliency,
            density=number("--density", a.density, 1) if a.density else None,
            **common,
        )
    else:
        path = film(
            runs[0], attention=a.attention, out=a.out, length=length or 2_000, checkpoint=checkpoints[0], **common
        )
    print(f"movie: {path}")


def _audit(argv: list[str]) -> None:
    from bestiary.analysis.audit import audit
    from bestiary.runs.folder import open_run

    parser = command_parser(
        "audit",
        "Trained and true returns of runs against size and training time, and how far they are from a trusted run.",
    )
    add_run(parser, nargs="+")
    parser.add_argument("--trusted", metavar="RUN", help="a run whose decisions the others' are compared with")
    parser.add_argument("--true-reward", metavar="REWARD", help="judge all runs by this (default: what each watched)")
    parser.add_argument("--checkpoints", choices=("all",), metavar="all", help="every checkpoint, not only the newest")
    parser.add_argument("--episodes", metavar="INT", default="20", help="whole games of each (default 20)")
    parser.add_argument("--num-envs", metavar="INT", default="10", help="environments at once (default 10)")
    parser.add_argument("--max-steps", metavar="INT", default="27k", help="give a game up after so many (default 27k)")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest action")
    parser.add_argument("--seed", metavar="INT", default="0", help="of environments and decisions (default 0)")
    parser.add_argument("--out", metavar="FOLDER", default="audit", help="tables and figures go here (default audit)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is there already")
    a = parser.parse_strictly(argv)
    audit(
        [open_run(r, a.trust_code) for r in a.run],
        Path(a.out),
        trusted=open_run(a.trusted, a.trust_code) if a.trusted else None,
        true_reward=a.true_reward,
        every_checkpoint=a.checkpoints == "all",
        episodes=number("--episodes", a.episodes, 1),
        greedy=a.greedy,
        seed=number("--seed", a.seed),
        num_envs=number("--num-envs", a.num_envs, 1),
        max_steps=number("--max-steps", a.max_steps, 1),
        overwrite=a.overwrite,
    )


def _export(argv: list[str]) -> None:
    from bestiary.analysis.export import export

    parser = command_parser(
        "export", "Rollouts of a trained agent as arrays: all that it saw, did, valued and was paid."
    )
    add_run(parser)
    parser.add_argument("--rollouts", metavar="INT", default="20", help="environments side by side (default 20)")
    parser.add_argument("--length", metavar="STEPS", default="500", help="steps of each (default 500)")
    parser.add_argument("--out", metavar="FILE", help="rollouts.npz (default: in the run folder's rollouts/)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--env", metavar="ENV", help="which of several tasks to play (default: the first)")
    add_player(parser)
    a, run, options = parse_with_env(parser, argv)
    if run is None:
        raise UserError(f"{a.run}: scripted players are evaluated (bestiary eval), not exported")
    path = export(
        run.with_env(options),
        out=a.out,
        rollouts=number("--rollouts", a.rollouts, 1),
        length=number("--length", a.length, 1),
        checkpoint=which_checkpoint(a.checkpoint, run),
        greedy=a.greedy,
        seed=number("--seed", a.seed),
        env=a.env,
        overwrite=a.overwrite,
    )
    print(f"rollouts: {path}")


def _compare(argv: list[str]) -> None:
    from bestiary.analysis.compare import compare
    from bestiary.runs.folder import open_run

    parser = command_parser(
        "compare", "Learning curves of runs; those that differ only in their seed are one curve with a band."
    )
    add_run(parser, nargs="+")
    parser.add_argument(
        "--out", metavar="FILE", default="curves.png", help="figure (default curves.png); a CSV goes beside it"
    )
    parser.add_argument(
        "--axis", choices=("steps", "minutes"), default="steps", help="steps or minutes (default steps)"
    )
    parser.add_argument(
        "--by", choices=("task",), help="a panel for each task, against steps of that task; always so for several tasks"
    )
    parser.add_argument("--zoom", metavar="A:B", help="a second panel with a part of the x axis, such as 2M:4M")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    a = parser.parse_strictly(argv)
    zoom = part_of_axis("--zoom", a.zoom) if a.zoom is not None else None
    runs = [open_run(r, a.trust_code) for r in a.run]
    compare(runs, Path(a.out), axis=a.axis, by_task=a.by == "task", zoom=zoom, overwrite=a.overwrite)


def _report(argv: list[str]) -> None:
    from bestiary.analysis.report import report

    parser = command_parser(
        "report",
        "All runs below a folder on one page: table, curves, movies, saliency, evaluations. One file, no requests.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="such as runs")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="default report.html")
    parser.add_argument(
        "--no-draw", action="store_true", help="only what is there: no movies and stills for runs without"
    )
    parser.add_argument(
        "--trust-code", action="store_true", help="run the copies of your own parts that the run folders keep"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    a = parser.parse_strictly(argv)
    path = report(Path(a.folder), Path(a.out), drawing=not a.no_draw, trust_code=a.trust_code, overwrite=a.overwrite)
    print(f"report: {path}")


READERS = {
    "eval": _eval,
    "movie": _movie,
    "audit": _audit,
    "export": _export,
    "compare": _compare,
    "report": _report,
}
