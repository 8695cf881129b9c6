"""Entry point of the command line: print the overview of all commands, or run one command.

Commands must start fast, so modules are imported late. Only the module of the called command is imported. Its function
first parses the arguments and then imports the code that it runs. So `--help` and errors in the arguments do not wait
for the import of torch. `train` and some tools of `look` import torch earlier, because their parsers need the classes
of components.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import sys
from collections.abc import Sequence

from bestiary import __version__
from bestiary.utils import plugins
from bestiary.utils.console import escape_warnings
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.options import suggest

USAGE = """usage: bestiary COMMAND [arguments]

Training
  train ENV...        train a new agent, for example: bestiary train atari/Pong
  resume RUN          continue a stopped run, or extend a finished one
  study FILE          train all runs of a study (variants and seeds) and report the results
  compat PROGRAM ...  run the command line of an original program, for example torchbeast.monobeast
  import FILE         convert a checkpoint of an original program to a run folder

Evaluation
  eval RUN            play whole games with a trained agent and report its returns
  video RUN...        record a video of one agent, or of several agents side by side
  compare RUN...      plot the learning curves of runs and print a table
  audit RUN...        compare the training return with the true return of agents
  export RUN          save a trained agent (ONNX, torch.export) or its games (NumPy arrays, Minari dataset)
  card RUN            write a folder with model card, weights, evaluation and video, to publish an agent
  report FOLDER       write an HTML page about all runs below a folder
  intervene RUN       change what an agent observes or does at one step, and measure the effect
  look TOOL RUN...    inspect an agent: saliency, attention, filters, actions, interventions, probes
  view [FOLDER]       show runs, studies and games in the web browser

Information
  runs [FOLDER]       list the runs below a folder
  list WHAT           list environments, components, presets, rewards, studies or zoo agents
  doctor              check this machine and the installed packages
  bench               measure the training throughput of this machine
  completion SHELL    print a completion script for bash, zsh or fish

ENV is an environment (bestiary list envs). RUN is a run folder, for example runs/latest, or a zoo agent, which is a
trained agent that comes with the package (bestiary list zoo). `bestiary COMMAND --help` describes a command."""

# Module (in bestiary/cli) and function of each command.
COMMANDS = {
    "train": ("train", "train"),
    "resume": ("train", "resume"),
    "study": ("study", "study"),
    "eval": ("evaluate", "eval_command"),
    "video": ("evaluate", "video_command"),
    "compare": ("evaluate", "compare_command"),
    "audit": ("audit", "audit_command"),
    "export": ("export", "export_command"),
    "card": ("export", "card_command"),
    "report": ("evaluate", "report_command"),
    "intervene": ("intervene", "intervene_command"),
    "look": ("look", "look"),
    "view": ("view", "view"),
    "runs": ("listing", "runs"),
    "list": ("listing", "list_command"),
    "doctor": ("doctor", "doctor"),
    "bench": ("bench", "bench_command"),
    "completion": ("completion", "completion"),
    "compat": ("compat", "compat_command"),
    "import": ("import_command", "import_command"),
}
# Command name that other programs use -> Bestiary command to suggest if a user enters this name.
FOREIGN_COMMANDS = {
    "test": "eval",
    "evaluate": "eval",
    "enjoy": "eval or video",
    "play": "eval or video",
    "render": "video",
    "test_render": "video",
    "rollout": "eval or export",
    "movie": "video",
    "saliency": "look saliency",
    "filters": "look filters",
    "attention": "look attention",
    "actions": "look actions",
    "record": "eval --record or video",
    "monobeast": "compat torchbeast.monobeast",
    "polybeast": "compat torchbeast.polybeast",
    "polybeast_env": "compat torchbeast.polybeast_env",
    "polybeast_learner": "compat torchbeast.polybeast_learner",
    "analyze_resnet": "compat torchbeast.analysis.analyze_resnet",
    "convert": "import",
    "continue": "resume",
    "learn": "train",
    "run": "train",
    "tune": "study",
    "sweep": "study",
    "benchmark": "bench",
    "plot": "compare",
    "dashboard": "view",
    "ui": "view",
    "serve": "view",
}


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit with its status."""
    # Without garbage collection, a short command such as `train --dry-run` takes a quarter less time. The imported
    # modules consist of more than a million objects that are never garbage. Commands that may take long turn the
    # collection on again (`allow_garbage_collection`). In all other commands, the collection at exit is also skipped.
    gc.disable()
    atexit.register(lambda: None if gc.isenabled() else gc.freeze())
    _open_closed_streams()
    faulthandler.enable()  # print a traceback if C++ code crashes
    status = run_command(list(sys.argv[1:] if argv is None else argv))
    _drop_unwritable_messages()
    sys.exit(status)


def run_command(argv: list[str]) -> int:
    """Run a command, print errors to standard error, and return the exit status.

    Status 0: success. 1: the command failed. 2: the input is invalid. 130 or 143: the command was interrupted by SIGINT
    or SIGTERM. 141: the reader of the output closed the pipe.
    """
    escape_warnings()
    try:
        return _dispatch(argv)
    except UserError as error:
        for problem in error.problems:
            _print_error(problem)
        return 2
    except RunError as error:
        _print_error(str(error))
        return 1
    except KeyboardInterrupt as interrupt:
        return 128 + getattr(interrupt, "signum", 2)
    except BrokenPipeError:
        # The reader of the output closed the pipe, for example `head` in `bestiary list envs | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as error:
        # If the argument parser raised SystemExit, for example after --help, raise it again. If code in a user's file
        # raised SystemExit, print a message: otherwise the command would end without a message.
        cause = plugins.describe_error(error)
        if cause is None:
            raise
        _print_error(cause)
        return 1
    except OSError as error:
        _print_error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    except BaseException as error:
        cause = plugins.describe_error(error)
        if cause is None and _is_out_of_memory(error):
            cause = f"not enough memory ({plugins.error_line(error)}); use a smaller network or fewer environments"
        if cause is None:
            raise  # an error in Bestiary itself: show the traceback
        _print_error(cause)
        return 1


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that NumPy or torch could not allocate memory.

    In this case, NumPy raises MemoryError, and torch on a CPU raises RuntimeError.
    """
    texts = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def _open_closed_streams() -> None:
    """Connect standard streams that the parent process has closed (`>&-`) to /dev/null.

    Otherwise files that are opened later would get the descriptors of these streams (0 to 2), and messages would be
    written to these files.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _drop_unwritable_messages() -> None:
    """Drop the buffered messages if they cannot be written to standard error.

    Otherwise Python would try to write the messages again at exit, fail, and change the exit status to 120. Code of an
    environment may have closed the stream, or set it to None.
    """
    try:
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _dispatch(argv: list[str]) -> int:
    """Call the function of the command `argv[0]`, or print the overview or version. Return the exit status."""
    command = argv[0] if argv else ""
    if command in ("", "-h", "--help", "help"):
        print(USAGE, flush=True)
        return 0 if argv else 2
    if command in ("--version", "version"):
        print(f"bestiary {__version__}")
        return 0
    if command not in COMMANDS:
        foreign = FOREIGN_COMMANDS.get(command.replace("-", "_"))
        hint = f"; did you mean {foreign}?" if foreign else suggest(command, COMMANDS)
        raise UserError(f"unknown command {command}{hint} (to list all commands: bestiary --help)")
    call_command(argv)
    return 0


def call_command(argv: Sequence[str]) -> None:
    """Call the function of the command `argv[0]` with the remaining words of `argv`."""
    module, function = COMMANDS[argv[0]]
    run = getattr(importlib.import_module(f"bestiary.cli.{module}"), function)
    if argv[0] != "train":  # `train` calls this function only after it has checked its arguments
        allow_garbage_collection()
    # Keep the underscores in the arguments of `compat`: they are flags of another program, for example --num_actors.
    run(list(argv[1:]) if argv[0] == "compat" else [_with_hyphens(word) for word in argv[1:]])


def allow_garbage_collection() -> None:
    """Turn garbage collection on if it is off. Exclude the objects that exist now: they belong to modules."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _with_hyphens(word: str) -> str:
    """Replace underscores in the name of a flag by hyphens: --num_envs=a_b becomes --num-envs=a_b."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _print_error(text: str) -> None:
    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)  # no control characters
    print(f"bestiary: {shown}", file=sys.stderr)
