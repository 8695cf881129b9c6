"""Arguments that depend on a run: the checkpoint, a recorded game, and the options of the run's environment."""

import argparse
from functools import partial
from typing import Any

from bestiary import envs
from bestiary.cli.arguments import Parser, none_if_invalid, parse_number
from bestiary.cli.option_flags import BOOLEAN_METAVAR, add_option_flags
from bestiary.runs.checkpoints import BEST_LINKS, best_steps
from bestiary.runs.run import Run, open_run
from bestiary.utils import trust
from bestiary.utils.errors import UserError
from bestiary.utils.options import BOOLEANS


def select_replay(a: argparse.Namespace) -> Any:
    """Return the recording (--replay) and the game in it (--game), or None if --replay is not given.

    Raise UserError if the user also gives options that cannot change a recorded game.
    """
    if a.replay is None:
        if a.game is not None:
            raise UserError(f"--game {a.game}: has an effect only with --replay; add --replay or remove --game")
        return None

    from bestiary.runs.recordings import INTERFACE_OPTIONS, open_recording

    given = {"greedy": a.greedy, "sample": a.sample, "env": a.env, "seed": a.seed != 0}
    given |= {name[4:]: value is not None for name, value in vars(a).items() if name.startswith("env.")}
    fixed = [name for name, is_given in given.items() if is_given and name not in INTERFACE_OPTIONS]
    if fixed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise UserError(f"{flags}: cannot change a recorded game (--replay); remove {flags}")
    recording = open_recording(a.replay)
    return recording, recording.game(a.game or 0)


def select_checkpoint(text: str | None, run: Any) -> int | None:
    """Return the number of steps after which the chosen checkpoint was saved, or None for the newest checkpoint.

    `text` is the value of --checkpoint: a number of steps, a name such as "best", or None.
    """
    if text not in BEST_LINKS:
        return parse_number("--checkpoint", int, {"low": 0}, text) if text else None
    steps = best_steps(run.path / "checkpoints", text)
    if steps is not None:
        return steps
    if text != "best":
        raise UserError(
            f"--checkpoint {text}: {run.path} has no such checkpoint. It is saved only by a run that has one task, "
            "uses --reward or --true-reward, and has finished at least 20 games"
        )
    training = run.config.training
    reason = "the run was not validated (--valid-every)"
    if training.valid_every or training.valid_levels or training.valid_mode:
        reason = "the returns of its tasks are on different scales, so that no mean can be computed"
    raise UserError(f"--checkpoint best: {run.path} has no such checkpoint, because {reason} (see docs/procgen.md)")


# --- commands that accept options of the run's environment ---


def parse_with_env_options(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, Any, dict[str, Any]]:
    """Parse a command that also accepts the options of the run's environment.

    Return the arguments, the run, and the environment options that the user gave. These options replace the
    environment options of the training. For a scripted policy, the run is None.
    """
    found, argv = _find_run(argv)
    wants_help = not {"-h", "--help"}.isdisjoint(argv)
    env = found.config.envs[0] if isinstance(found, Run) else _env_of_words(argv)
    if not env and not wants_help:
        raise UserError(f"{found}: no environment given; for example: --env warehouse")
    if wants_help and not env:
        parser.epilog = f"`{parser.prog} RUN --help` also lists the options of the run's environment."
    if env:
        group = parser.add_argument_group(f"options of {env} (default: as in training)")
        taken = [spelling for action in parser._actions for spelling in action.option_strings]
        name = env if isinstance(found, Run) else trust.named_by_user(env)
        add_option_flags(group, envs.lookup_env(name).options, "env", taken)
    a = parser.parse_strictly(_with_explicit_booleans(argv, parser))
    given = {name[4:]: value for name, value in vars(a).items() if name.startswith("env.") and value is not None}
    return a, found if isinstance(found, Run) else None, given


def _find_run(argv: list[str]) -> tuple[Any, list[str]]:
    """Find the argument that names a run or a scripted policy.

    Return the opened run or the name of the scripted policy, and the arguments in a new order. The name of the run and
    the following words up to the next flag are moved to the front. There, no flag precedes them, so argparse cannot
    mistake them for values of a flag. If --help is given without a run, return None and the unchanged arguments.
    """
    trust_code = "--trust-code" in argv
    for k, word in enumerate(argv):
        if not word.startswith("-"):
            run = word if word.startswith("scripted:") else none_if_invalid(partial(open_run, word, trust_code))
            if run is not None:
                end = next((n for n in range(k + 1, len(argv)) if argv[n].startswith("-")), len(argv))
                return run, [*argv[k:end], *argv[:k], *argv[end:]]
    if {"-h", "--help"}.isdisjoint(argv):
        words = [word for word in argv if not word.startswith("-")]
        if not words:
            raise UserError("no run given; for example: runs/latest (to list all runs: bestiary runs)")
        open_run(words[0])  # raises UserError with the reason why this is not a run
    return None, argv


def _env_of_words(argv: list[str]) -> str:
    """Return the value of --env on the command line `argv`, or an empty string if --env is not given."""
    env = ""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--env":
            env = following
        elif word.startswith("--env="):
            env = word.partition("=")[2]
    return env


def _with_explicit_booleans(argv: list[str], parser: Parser) -> list[str]:
    """Add the value "on" to boolean flags without a value: `--legacy RUN` becomes `--legacy=on RUN`.

    Without the value "on", argparse would use RUN as the value of the flag.
    """
    words = []
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        action = parser._option_string_actions.get(word)
        is_bare = action is not None and action.metavar == BOOLEAN_METAVAR and following not in BOOLEANS
        words.append(f"{word}=on" if is_bare else word)
    return words
