"""Analyses of a study: interpretability tools and reward audits that run after the training of its runs.

    [[analysis]]
    name = "popart-against-single"
    tool = "filters"
    variants = ["popart", "single"]     # default: all
    match = "optimal"                   # options of `bestiary look filters`

This module reads the tables. analysis_runner.py runs the commands.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bestiary.studies.study_file import FOLDER_NAME, FOLDER_NAME_RULE, StudyFile, list_of_tables
from bestiary.utils import trust
from bestiary.utils.options import suggest
from bestiary.utils.plugin_names import PluginRef, split_rewards

INTEGER = "an integer >= 0"
NUMBER = "a number >= 0"
TEXT = "a text"
SWITCH = "true or false"
CHECKS: dict[str, Callable[[Any], bool]] = {
    INTEGER: lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= 0,
    TEXT: lambda value: isinstance(value, str) and value != "",
    SWITCH: lambda value: isinstance(value, bool),
}
GAME_OPTIONS = {"start": INTEGER, "length": INTEGER, "greedy": SWITCH, "seed": INTEGER, "fps": NUMBER}
EPISODE_OPTIONS = {
    "episodes": INTEGER,
    "greedy": SWITCH,
    "seed": INTEGER,
    "num_envs": INTEGER,
    "max_steps": INTEGER,
}


@dataclass(frozen=True)
class Tool:
    """A command that an analysis can run."""

    words: tuple[str, ...]  # the command without `bestiary`
    options: dict[str, str]  # {name of an option: accepted values, a key of CHECKS}
    title: str  # heading on the report page
    suffix: str = ".png"  # suffix of the command's output file; "" if the command writes a folder
    each_task: bool = False  # True: one command for each run and task; False: one command for all runs


TOOLS = {
    "actions": Tool(("look", "actions"), EPISODE_OPTIONS, "Action frequencies"),
    "filters": Tool(
        ("look", "filters"),
        {"points": INTEGER, "match": TEXT, "between": TEXT, "frames": INTEGER, "seed": INTEGER},
        "Comparison of convolution filters",
    ),
    "saliency": Tool(
        ("look", "saliency"),
        {
            **GAME_OPTIONS,
            "preset": TEXT,
            "density": INTEGER,
            "radius": NUMBER,
            "output": TEXT,
            "mode": TEXT,
            "distance": TEXT,
            "scale": TEXT,
            "colors": TEXT,
        },
        "Saliency",
        ".gif",
        each_task=True,
    ),
    "attention": Tool(("look", "attention"), GAME_OPTIONS, "Attention", ".gif", each_task=True),
    "video": Tool(
        ("video",), {key: kind for key, kind in GAME_OPTIONS.items() if key != "start"}, "Game", ".gif", each_task=True
    ),
    "audit": Tool(
        ("audit",), {**EPISODE_OPTIONS, "checkpoints": TEXT, "true_reward": TEXT}, "Training and true return", ""
    ),
}


@dataclass(frozen=True)
class Analysis:
    """One [[analysis]] table of a study file."""

    name: str
    tool: str
    variants: tuple[str, ...]  # names of variants; empty: all
    options: dict[str, Any] = field(default_factory=dict)
    trusted: str = ""  # only for the tool audit: variant with whose policy all policies are compared; empty: none
    published: str = ""  # published result, shown above the figures


def read_analyses(file: StudyFile, variants: list[str], problems: list[str]) -> tuple[Analysis, ...]:
    """Return the analyses of a study file. Wrong values are appended to `problems`.

    `variants` are the names that the keys `variants` and `trusted` may contain. The selected scale may change options;
    a changed option applies to each analysis whose tool has this option.
    """
    scaled = dict(file.selected_scale.get("analysis", {}))
    analyses = []
    for number, content in enumerate(list_of_tables(file, "analysis", problems)):
        table = f"analysis {number}"
        found = len(problems)
        tool = content.get("tool")
        if not isinstance(tool, str) or tool not in TOOLS:
            hint = suggest(str(tool), TOOLS) if tool else ""
            problems.append(
                f"{file.location(table, 'tool')}: tool = {tool!r}: expected one of {', '.join(TOOLS)}{hint}"
            )
            continue
        name = content.get("name", tool)
        if not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
            problems.append(f"{file.location(table, 'name')}: name = {name!r}: {FOLDER_NAME_RULE}")
        known = [
            "name",
            "tool",
            "variants",
            "published",
            *(["trusted"] if tool == "audit" else []),
            *TOOLS[tool].options,
        ]
        options = {**content, **{key: value for key, value in scaled.items() if key in TOOLS[tool].options}}
        chosen = content.get("variants", [])
        names = [*chosen, *filter(None, [content.get("trusted")])] if isinstance(chosen, list) else [chosen]
        problems += [
            f"{file.location(table, 'variants')}: there is no variant {wrong}{suggest(str(wrong), variants)}"
            for wrong in names
            if wrong not in variants
        ]
        for key, value in options.items():
            if key not in known:
                problems.append(
                    f"{file.location(table, key)}: unknown key {key} of the analysis {tool}{suggest(key, known)}"
                )
            elif key in TOOLS[tool].options and not CHECKS[TOOLS[tool].options[key]](value):
                kind = TOOLS[tool].options[key]
                problems.append(f"{file.location(table, key)}: {key} = {value!r}: expected {kind}")
        if len(problems) == found:
            own = {key: value for key, value in options.items() if key in TOOLS[tool].options}
            analyses.append(
                Analysis(name, tool, tuple(chosen), own, content.get("trusted", ""), str(content.get("published", "")))
            )
    names = [analysis.name.lower() for analysis in analyses]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{file.location('', 'analysis')}: two analyses have the name {name}; rename one of them")
    return tuple(analyses)


def trust_analyses(file: StudyFile, analyses: Iterable[Analysis], trust_code: bool) -> None:
    """Raise UserError if an option of an analysis names a plug-in that the user has not used before.

    The commands of the analyses execute these plug-ins. If `trust_code` is true, trust all of them instead.
    """
    for analysis in analyses:
        for reward in split_rewards(analysis.options.get("true_reward", "")):
            if isinstance(reward, PluginRef):
                trust.trust_in_file(reward, f"{file.path}, analysis {analysis.name},", trust_code)
