"""Generate docs/migration.md from the flags in PROGRAMS and from the template `migration_template.md`.

python -m bestiary.compat.migration_page > docs/migration.md
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bestiary.compat.flag_types import IGNORED, REFUSED, Flag, Mode
from bestiary.compat.programs import PROGRAMS
from bestiary.compat.translate import format_command, translate

TEMPLATE = Path(__file__).with_name("migration_template.md")
PLACEHOLDER = "<!-- sections -->\n"
# Title of each variant (Values.variants).
VARIANTS = {
    "popart": "PopArt fork",
    "popart-poly": "PolyBeast of the PopArt fork",
    "popart-mono": "MonoBeast of the PopArt fork",
    "reward": "reward-misspecification fork",
    "poly": "PolyBeast",
    "mono": "MonoBeast",
}


@dataclass(frozen=True)
class Example:
    """A command line of an original program. Its translation is shown on the page."""

    program: str
    arguments: str
    cluster: str | None = None


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    programs: tuple[str, ...]  # names of the programs; the flags of the first program are listed
    examples: tuple[Example, ...]
    fork: str | None = None  # only flags of this fork; empty: flags that belong to no fork; None: all flags
    modes: tuple[str, ...] = ()  # modes to list; empty: all


PONG = "--env PongNoFrameskip-v4"
GAMES = "AirRaidNoFrameskip-v4,CarnivalNoFrameskip-v4,PongNoFrameskip-v4"
LEARNER = "--learning_rate 0.0004 --epsilon 0.01 --entropy_cost 0.01 --batch_size 4 --unroll_length 80"
SRWM_SIZES = "--num_layers 2 --hidden_size 128 --num_head 8 --dim_head 16 --use_sr"
SECTIONS = (
    Section(
        "TorchBeast: MonoBeast and PolyBeast",
        tuple(f"torchbeast.{name}" for name in ("monobeast", "polybeast", "polybeast_learner", "polybeast_env")),
        (
            Example(
                "torchbeast.monobeast",
                f"{PONG} --num_actors 45 --total_steps 30000000 {LEARNER} --num_buffers 60 --num_threads 4 "
                "--xpid example --savedir logs",
            ),
            Example("torchbeast.monobeast", f"{PONG} --mode test --xpid example --savedir logs"),
            Example("torchbeast.polybeast_env", "--num_servers 10 --xpid example --savedir logs", cluster="auto"),
        ),
        fork="",
        modes=("train", "test", "test_render"),
    ),
    Section(
        "PopArt fork of TorchBeast",
        ("torchbeast.polybeast", "torchbeast.monobeast"),
        (
            Example(
                "torchbeast.polybeast",
                f"--mode train --xpid MultiTaskPopArt --env {GAMES} --total_steps 300000000 --use_popart",
            ),
            Example("torchbeast.polybeast", f"--mode test --xpid MultiTaskPopArt {PONG} --savedir=./models"),
            Example("torchbeast.polybeast", f"--mode test_render --xpid MultiTaskPopArt {PONG} --savedir=./models"),
        ),
        fork="popart",
        modes=("record", "env_info"),
    ),
    Section(
        "PopArt fork: saliency",
        ("torchbeast.saliency",),
        (
            Example(
                "torchbeast.saliency",
                f"--xpid MultiTaskPopArt {PONG} --first_frame 0 --num_frames 100 --savedir=./models",
            ),
        ),
    ),
    Section(
        "PopArt fork: filter comparison",
        ("torchbeast.analysis.analyze_resnet",),
        (
            Example(
                "torchbeast.analysis.analyze_resnet",
                "--model_load_path models --mode filter_comp --comp_num_models 10 --comp_between multi_multipop",
            ),
            Example("torchbeast.analysis.analyze_resnet", "--load_path models/Pong --mode filter_vis --layer_index 1"),
        ),
    ),
    Section(
        "PopArt fork: attention",
        ("torchbeast.analysis.visualize_aaa",),
        (Example("torchbeast.analysis.visualize_aaa", f"--xpid aaa {PONG} --savedir=./models"),),
    ),
    Section(
        "Reward-misspecification fork of TorchBeast",
        ("torchbeast.monobeast",),
        (
            Example(
                "torchbeast.monobeast",
                f"--env RiverraidNoFrameskip-v4 --num_actors 45 --total_steps 50000000 {LEARNER} --fuel_multiplier 1 "
                "--move_penalty -2 --true_move_penalty 5 --hidden_size 1024 --num_layers 2 --xpid center_1024_2 "
                "--savedir runs",
            ),
            Example(
                "torchbeast.monobeast",
                "--env RiverraidNoFrameskip-v4 --mode eval --savedir runs --xpid center_1024_2 --num_episodes 4",
            ),
        ),
        fork="reward",
        modes=("eval",),
    ),
    Section(
        "Self-referential weight matrices on ProcGen",
        ("torchbeast_procgen.polybeast", "torchbeast_procgen.polybeast_learner"),
        (
            Example(
                "torchbeast_procgen.polybeast",
                "--single_gpu --multi_env 6 --num_actors 48 --num_servers 48 --total_steps 300_000_000 "
                "--save_extra_checkpoint 150_000_000 --learning_rate 0.0006 --entropy_cost 0.01 --batch_size 32 "
                f"--unroll_length 50 {SRWM_SIZES} --num_levels 200 --distribution_mode easy --valid_distribution_mode "
                "easy --valid_num_levels 200 --valid_start_level 500 --valid_num_episodes 10 --xpid srwm --savedir "
                "runs",
            ),
            Example(
                "torchbeast_procgen.polybeast_learner",
                f"--mode test --env procgen:procgen-starpilot-v0 {SRWM_SIZES} --xpid srwm --savedir runs "
                "--test_distribution_mode easy --test_num_levels 200 --test_start_level 1000",
            ),
        ),
    ),
    Section(
        "Influence-aware memory: main.py",
        ("iam.main",),
        (
            Example(
                "iam.main", "--env-name warehouse --num-steps 8 --recurrent-policy --log-dir ./log_w/FNN8-1 --seed 1"
            ),
            Example("iam.main", "--env-name warehouse --num-steps 8 --IAM --log-dir ./log_w/IAM-1 --seed 1"),
            Example(
                "iam.main",
                "--env-name BreakoutNoFrameskip-v4 --num-processes 8 --num-env-steps 50007104 --num-steps 8 "
                "--ppo-epoch 3 --lr 0.00025 --log-dir ./log_bf/IAM-1 --IAM --flicker",
            ),
        ),
    ),
)


def render_page() -> str:
    """Return the text of docs/migration.md."""
    sections = "\n".join(_render_section(section) for section in SECTIONS)
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, sections)


def _render_section(section: Section) -> str:
    program = PROGRAMS[section.programs[0]]
    names = ", ".join(f"`{name}`" for name in section.programs)
    parts = [f"## {section.title}\n\nPrograms: {names}.\n"]
    parts += [_render_example(example) for example in section.examples]
    modes = {name: mode for name, mode in program.modes.items() if not section.modes or name in section.modes}
    parts += _render_modes(modes)
    flags = [flag for flag in program.flags if section.fork is None or flag.fork == section.fork]
    parts.append("| flag | default | Bestiary | difference |\n|---|---|---|---|")
    parts += [f"| `{flag.name}` | {_defaults(flag)} | {_option(flag)} | {_cell(flag.difference)} |" for flag in flags]
    return "\n".join(parts) + "\n"


def _render_example(example: Example) -> str:
    """Return an example: the original command line and its translation."""
    arguments = shlex.split(example.arguments)
    cluster = [] if example.cluster is None else ["--cluster", example.cluster]
    original = format_command(["compat", *cluster, example.program, *arguments])
    commands = translate(example.program, arguments, example.cluster).commands
    translated = "\n".join(format_command(words) for words in commands)
    return f"```\n$ {original}\n{translated}\n```\n"


def _render_modes(modes: dict[str, Mode]) -> Iterator[str]:
    """Yield the lines of the table of modes."""
    yield "| mode | command | options that are always set | differences |\n|---|---|---|---|"
    for name, mode in modes.items():
        command = f"`bestiary {' '.join(mode.command)}`" if mode.command else "none"
        fixed = "; ".join(f"`{words}` ({meaning})" for words, meaning in mode.fixed)
        yield f"| {name} | {command} | {fixed} | {_cell('; '.join(mode.differences))} |"
    yield ""


def _defaults(flag: Flag) -> str:
    if flag.kind is bool:
        base = "on" if flag.default else "off"
    else:
        base = "none" if flag.default is None else _cell(str(flag.default))
    others = [f"{VARIANTS[variant]}: {_cell(str(value))}" for variant, value in flag.defaults.items()]
    return "; ".join([base, *others])


def _option(flag: Flag) -> str:
    if flag.status in (IGNORED, REFUSED):
        return "accepted, no effect" if flag.status == IGNORED else "refused"
    return _cell(flag.option if "`" in flag.option or not flag.option.startswith("--") else f"`{flag.option}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render_page(), end="")
