"""Run the analyses of a study: each analysis is one or more `bestiary` commands on the study's own runs.

The files of an analysis are written to analysis/NAME/ in the folder of the study. Its figures and videos appear on the
report page. An analysis is made again if its commands or the checkpoints of its runs have changed.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bestiary.config.config import env_slug
from bestiary.studies.analyses import TOOLS, Analysis
from bestiary.studies.executors import start_command
from bestiary.studies.run_log import close_log, failure_reason
from bestiary.studies.trial import Trial
from bestiary.studies.variants import select_variants
from bestiary.utils import safe_files
from bestiary.utils.console import note

POLL_SECONDS = 0.2


def analysis_folder(analysis: Analysis, folder: Path) -> Path:
    """Return the folder of the files of an analysis. `folder` is the folder of the study."""
    return folder / "analysis" / analysis.name


def analysed_trials(analysis: Analysis, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that are analysed: all seeds for an audit, otherwise the first seed of each variant."""
    chosen = select_variants(list(dict.fromkeys(trial.variant for trial in trials)), analysis.variants)
    own = [trial for variant in chosen for trial in trials if trial.variant is variant]
    return own if analysis.tool == "audit" else [trial for trial in own if trial.seed == trials[0].seed]


def analysis_commands(analysis: Analysis, trials: Sequence[Trial], folder: Path) -> list[list[str]]:
    """Return the arguments of each `bestiary` command of an analysis."""
    tool, out, chosen = TOOLS[analysis.tool], analysis_folder(analysis, folder), analysed_trials(analysis, trials)
    flags = [word for key, value in analysis.options.items() for word in _flag_words(key, value)]
    if analysis.trusted:
        reference = next(trial for trial in trials if analysis.trusted in trial.variant.names)
        flags += ["--trusted", str(reference.path)]
    if not tool.each_task:
        target = out / f"{analysis.tool}{tool.suffix}" if tool.suffix else out
        return [[*tool.words, *(str(trial.path) for trial in chosen), *flags, "--out", str(target), "--overwrite"]]
    commands = []
    for trial in chosen:
        for env in trial.config.envs:
            has_several = len(trial.config.envs) > 1
            name = f"{trial.variant.name}-{env_slug(env)}" if has_several else trial.variant.name
            task = ["--env", env] if has_several else []
            target = out / f"{name}{tool.suffix}"
            commands.append([*tool.words, str(trial.path), *task, *flags, "--out", str(target), "--overwrite"])
    return commands


def _flag_words(key: str, value: Any) -> list[str]:
    """Return an option as words of a command line.

    Flag and value are one word, because a value from the study file could itself look like a flag.
    """
    flag = f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    return [f"{flag}={value}"]


def run_analyses(
    analyses: Sequence[Analysis], trials: Sequence[Trial], folder: Path, is_interrupted: Callable[[], bool]
) -> dict[str, str]:
    """Make each analysis whose runs are trained, unless it has up-to-date results.

    Return {name: reason} for each analysis that failed, or was not made because a run is not trained.
    `is_interrupted()` is true if the user has stopped the study.
    """
    problems = {}
    for analysis in analyses:
        if is_interrupted():
            break
        if state := analysis_problem(analysis, trials, folder):
            untrained = [trial.name for trial in analysed_trials(analysis, trials) if not trial.is_trained]
            if untrained:
                problems[analysis.name] = state
                continue
            note(f"analysis {analysis.name}: started")
            if reason := _run_commands(analysis, trials, folder, is_interrupted):
                problems[analysis.name] = reason
            note(f"analysis {analysis.name}: {f'failed: {reason}' if reason else 'done'}")
    return problems


def analysis_problem(analysis: Analysis, trials: Sequence[Trial], folder: Path) -> str:
    """Return "" if the analysis has up-to-date results, otherwise the reason why it has none."""
    if untrained := [trial.name for trial in analysed_trials(analysis, trials) if not trial.is_trained]:
        return f"not made, because {untrained[0]} is not trained"
    try:
        stamp = json.loads(safe_files.read_text(_stamp_path(analysis, folder), folder))
        if stamp == _stamp(analysis, trials, folder):
            return ""
    except (OSError, ValueError, RecursionError):
        pass
    reason = failure_reason(_log_path(analysis, folder))
    return f"failed: {reason}" if reason else "not made yet"


def _run_commands(analysis: Analysis, trials: Sequence[Trial], folder: Path, is_interrupted: Callable[[], bool]) -> str:
    """Run the commands of an analysis one after another. If a command fails, return the reason, otherwise ""."""
    log = _log_path(analysis, folder)
    safe_files.make_folder(analysis_folder(analysis, folder), folder)
    for command in analysis_commands(analysis, trials, folder):
        process = start_command(log, command)
        assert process.stdin is not None
        while process.poll() is None:
            if is_interrupted() and not process.stdin.closed:
                process.stdin.close()
            time.sleep(POLL_SECONDS)
        process.stdin.close()
        close_log(log, None if is_interrupted() else process.returncode)
        if is_interrupted():
            return "interrupted"
        if process.returncode:
            return f"{failure_reason(log)} ({log})"
    stamp = json.dumps(_stamp(analysis, trials, folder), indent=1) + "\n"
    safe_files.write_text(_stamp_path(analysis, folder), stamp, folder)
    return ""


def _log_path(analysis: Analysis, folder: Path) -> Path:
    return folder / "logs" / f"analysis-{analysis.name}.log"


def _stamp_path(analysis: Analysis, folder: Path) -> Path:
    return analysis_folder(analysis, folder) / "done.json"


def _stamp(analysis: Analysis, trials: Sequence[Trial], folder: Path) -> dict[str, Any]:
    """Return the content of the file that marks an analysis as done: its commands and the checkpoints of its runs."""
    return {
        "commands": analysis_commands(analysis, trials, folder),
        "checkpoints": {trial.name: trial.run.steps for trial in analysed_trials(analysis, trials)},
    }
