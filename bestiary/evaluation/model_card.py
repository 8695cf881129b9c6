"""Write a folder that can be published: a trained agent, its evaluation, a video and a model card (README.md).

The folder is a run folder with one checkpoint, so all commands accept it (`bestiary eval FOLDER`). The first lines of
README.md are metadata in the format of the Hugging Face Hub.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from bestiary import __version__
from bestiary.agents.agent import count_parameters
from bestiary.config.toml import dump_toml, read_tables
from bestiary.evaluation.evaluate import evaluate
from bestiary.evaluation.playback import PlaybackOptions
from bestiary.evaluation.results import Evaluation
from bestiary.evaluation.statistics import describe_interval, format_interval
from bestiary.evaluation.video import record_video
from bestiary.runs import checkpoints, plugin_copies
from bestiary.runs.checkpoints import Checkpoint, write_manifest
from bestiary.runs.run import Run
from bestiary.utils import safe_files
from bestiary.utils.console import plural, printable, warn
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef, parse_name

TABLES = ("config.toml", "metrics.csv", "episodes.csv")
CHECKPOINT_FILES = ("model.safetensors", "state.json")
VIDEO = "replay.mp4"  # the Hugging Face Hub shows a video with this name
CARD = "README.md"


def write_card(
    run: Run,
    *,
    out: str | Path | None = None,
    episodes: int = 100,
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    video: bool = True,
    overwrite: bool = False,
) -> Path:
    """Evaluate a run, and write a folder with the results, a video, the weights and a model card. Return the folder.

    If `out` is None, a folder in cards/ of the run folder is created. An existing folder is replaced only if
    `overwrite` is True and the folder contains a model card.
    """
    chosen = checkpoints.choose(run.path, checkpoint)
    folder = _check_folder(Path(out).expanduser(), overwrite) if out is not None else None
    if folder is None:
        folder = run.new_output_path("cards", f"{chosen.steps:012d}", "")
    evaluation = evaluate(run, episodes=episodes, checkpoint=chosen.steps, greedy=greedy, seed=seed)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _copy_run(run, chosen, partial)
        evaluation.save(partial / "evaluation.json")
        _name_copies(run, partial)
        write_manifest(partial / "checkpoints" / chosen.path.name, CHECKPOINT_FILES)
        has_video = video and _record(run, chosen, partial / VIDEO, greedy, seed)
        config_text = (partial / "config.toml").read_text()
        (partial / CARD).write_text(_card_text(run, chosen, evaluation, has_video, folder.name, config_text))
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _check_folder(folder: Path, overwrite: bool) -> Path:
    """Return the folder. Raise UserError if it exists and may not be replaced, or if it cannot be created."""
    if folder.exists():
        is_card = (folder / CARD).is_file() and (folder / "evaluation.json").is_file()
        if not overwrite or not is_card:
            remedy = "choose another name or add --overwrite" if is_card else "choose another name"
            raise UserError(f"--out {folder} exists{'' if is_card else ' and contains no model card'}; {remedy}")
    if not folder.resolve().parent.is_dir():
        raise UserError(f"--out {folder}: there is no folder {folder.parent}; create it first")
    return folder


def _copy_run(run: Run, checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the configuration, the tables, the weights and the plug-ins of a run.

    The run may come from another person, so links are not followed: the folder will be published, and links could point
    to private files. Only the plug-ins that the configuration names are copied.
    """
    for name in TABLES:
        if os.path.lexists(run.path / name):
            _copy_file(run, run.path / name, folder / name)
    weights = folder / "checkpoints" / checkpoint.path.name
    weights.mkdir(parents=True)
    for name in CHECKPOINT_FILES:
        _copy_file(run, checkpoint.path / name, weights / name)
    plugin_copies.write_copies(run.config, folder)


def _copy_file(run: Run, source: Path, target: Path) -> None:
    """Copy a file of a run. Raise UserError if it cannot be read, or if it is a link."""
    try:
        target.write_bytes(safe_files.read_bytes(source, run.path, safe_files.MAX_TENSOR_BYTES))
    except OSError as error:
        raise UserError(f"{source} cannot be copied: {error.strerror or error}") from error


def _name_copies(run: Run, folder: Path) -> None:
    """Replace the paths of plug-ins in a card folder by the paths of their copies, relative to the folder."""
    # If an original file is missing, `run.config` names its copy, and config.toml names the original.
    hashes = {**plugin_copies.read_hashes(run.path), **run.config.plugin_hashes}
    if not hashes:
        return
    copies = {
        file: f"{plugin_copies.FOLDER}/{plugin_copies.copy_name(Path(file), sha256)}" for file, sha256 in hashes.items()
    }
    path = folder / "config.toml"
    comments = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    path.write_text(comments + dump_toml(_replace_paths(read_tables(path), copies)))
    for path in (folder / "evaluation.json", *folder.glob("checkpoints/*/state.json")):
        path.write_text(json.dumps(_replace_paths(json.loads(path.read_text()), copies), indent=1))


def _replace_paths(value: Any, copies: dict[str, str]) -> Any:
    """Return a value of a TOML or JSON file, in which each path of a plug-in is replaced by the path of its copy."""
    if isinstance(value, dict):
        return {_replace_paths(key, copies): _replace_paths(item, copies) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_paths(item, copies) for item in value]
    if isinstance(value, str):
        for file, copy in copies.items():
            value = copy if value == file else value.replace(f"{file}:", f"{copy}:")
    return value


def _record(run: Run, checkpoint: Checkpoint, path: Path, greedy: bool, seed: int) -> bool:
    """Record a video of one game. Return False, with a warning, if the environment cannot be rendered."""
    try:
        record_video(run, PlaybackOptions(2_000, checkpoint=checkpoint.steps, greedy=greedy, seed=seed), out=path)
    except UserError as error:
        warn(f"the card has no video: {error}")
        return False
    return True


def _card_text(
    run: Run, checkpoint: Checkpoint, evaluation: Evaluation, has_video: bool, folder: str, config_text: str
) -> str:
    """Return the text of README.md.

    Args:
        folder: name of the folder, for the commands in the text.
        config_text: content of config.toml in this folder.
    """
    config = run.config
    protocol = evaluation.protocol
    names = {kind: _shown(component.name) for kind, component in config.components.items()}
    flags = f"--episodes {protocol['games']} --num-envs {protocol['num_envs']} --seed {protocol['seed']}"
    flags += " --greedy" if protocol["policy"] == "greedy" else ""
    trust = " --trust-code" if config.plugin_hashes else ""
    agent = ", ".join(f"{kind} {_code(name)}" for kind, name in names.items() if kind != "algo")
    facts = {
        "environment": ", ".join(_code(_shown(name)) for name in config.envs),
        "algorithm": _code(names["algo"]),
        "agent": f"{agent}; {count_parameters(run.agent(checkpoint)):,} parameters",
        "training": f"{checkpoint.steps:,} of {config.training.steps:,} steps, seed {config.training.seed}",
        "versions": f"Bestiary {__version__}; `config.toml` has the versions of the training",
    }
    video = f'<video controls autoplay loop src="{VIDEO}"></video>' if has_video else ""
    code_note = (
        "The agent uses its author's own Python files (`plugins/`). They are executed only with `--trust-code`: read "
        "them first."
        if trust
        else ""
    )
    parts = [
        _metadata(run, evaluation),
        f"# {_escape(run.name)}",
        f"An agent for {facts['environment']}, trained with Bestiary.",
        video,
        _table(["", ""], [list(row) for row in facts.items()]),
        "## Evaluation",
        _evaluation_table(evaluation),
        f"Whole games, {'greedy' if protocol['policy'] == 'greedy' else 'sampled'} actions, at most "
        f"{protocol['max_steps']:,} steps; {plural(evaluation.unfinished, 'game')} did not end "
        f"({describe_interval('games')}). All games are in `evaluation.csv`. Command:",
        f"```\nbestiary eval {folder} {flags}{trust}\n```",
        "## Usage",
        f"```python\n{_usage(folder, bool(trust))}\n```",
        code_note,
        "## Training",
        f"```\nbestiary train --config {folder}/config.toml{trust}\n```",
        "The complete configuration:",
        _code_block(config_text.strip(), "toml"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(name: str) -> str:
    """Return the name of an environment or component without the folder of a user's file."""
    ref = parse_name(name)
    return f"{ref.path.name}:{ref.attribute}" if isinstance(ref, PluginRef) else name


def _metadata(run: Run, evaluation: Evaluation) -> str:
    """Return the metadata of the Hugging Face Hub, as YAML between two lines of hyphens."""
    results = []
    for result in evaluation.results:
        summary = result.statistics["game_return"]
        results += [
            "  - task: {type: reinforcement-learning, name: reinforcement-learning}",
            f"    dataset: {{name: {_quote(result.task)}, type: {_quote(result.task)}}}",
            "    metrics:",
            "    - type: mean_reward",
            "      name: mean_reward",
            f'      value: "{summary["mean"]:.2f} +/- {summary["sd"]:.2f}"',
            "      verified: false",
        ]
    return "\n".join(
        [
            "---",
            "library_name: bestiary",
            "pipeline_tag: reinforcement-learning",
            "tags:",
            "- reinforcement-learning",
            "- deep-reinforcement-learning",
            "- bestiary",
            *(f"- {_quote(_shown(name))}" for name in run.config.envs),
            "model-index:",
            f"- name: {_quote(run.name)}",
            "  results:",
            *results,
            "---",
        ]
    )


def _quote(text: Any) -> str:
    """Return a text as a YAML string. JSON strings are YAML strings."""
    return json.dumps(str(text))


def _evaluation_table(evaluation: Evaluation) -> str:
    """Return a Markdown table with n, mean and interval of each quantity and task."""
    rows = []
    for result in evaluation.results:
        for name, summary in result.statistics.items():
            digits = 4 if name.endswith("_per_step") else 2
            mean, sd, low, high = (f"{summary[key]:.{digits}f}" for key in ("mean", "sd", "min", "max"))
            interval = format_interval(summary, digits)
            rows.append(
                [_escape(result.task), name.replace("_", " "), f"{summary['n']:.0f}", mean, interval, sd, low, high]
            )
    return _table(["task", "quantity", "n", "mean", "95 % interval", "sd", "min", "max"], rows)


def _escape(text: str) -> str:
    """Return a text on one line, in which no character has a meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~&])", r"\\\1", " ".join(printable(text).split()))


def _code(name: str) -> str:
    """Return a name as a code span. Characters that would end the span or the cell of a table are replaced."""
    return f"`{' '.join(printable(name).split()).replace('`', chr(39)).replace('|', '/')}`"


def _code_block(text: str, language: str) -> str:
    """Return a code block. Its fence is longer than all sequences of backticks in the text, so it cannot end early."""
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text)), 0)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _usage(folder: str, trust_code: bool) -> str:
    """Return a program that loads the agent and plays with it."""
    argument = ", trust_code=True" if trust_code else ""
    return f"""import bestiary

run = bestiary.load({_quote(folder)}{argument})
env = run.make_vec(num_envs=4)
policy = run.policy()
observation, _ = env.reset()
reward = done = None
for _ in range(1000):
    action = policy.act(observation, reward=reward, done=done)
    observation, reward, terminated, truncated, _ = env.step(action)
    done = terminated | truncated"""
