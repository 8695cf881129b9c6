"""Read a study: one TOML file that describes many runs.

    name = "recall-memories"
    seeds = [1, 2, 3]
    evaluate = 200                      # after training, each agent is evaluated (see evaluations.py)
    dashed = ["stack8"]                 # drawn as a dashed horizontal line at the final return, without a curve
    zoom = "200k:300k"                  # an additional panel shows this range of the x axis

    [base]                              # options of all runs, written as in a config file
    preset = "recall"

    [grid]                              # each combination of these values is a variant
    memory = ["none", "gru", "lstm"]

    [[variant]]                         # a named variant with its own options
    name = "stack8"
    frame_stack = 8

    [[variant]]
    name = "finetuned"
    after = "stack8"                    # starts from the last checkpoint of this variant with the same seed
    grid = { env = ["toy/chain", "toy/bandit"] }   # the variant's own grid

    [[analysis]]                        # interpretability tools and audits after the training (see analyses.py)
    [[published]]                       # published results, shown beside the study's results (see published_values.py)

    [search]                            # a search for good values of options, instead of variants (see search.py)

    [scale.small.options]               # `--scale small`: options that override all other tables
    steps = "10k"

If there are named variants and a grid, each named variant is combined with each combination of the grid. All variants
are checked before the first run starts. Error messages state the line of the file.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bestiary.agents.agent import count_parameters
from bestiary.config.resolve import resolve
from bestiary.envs import lookup_score_range
from bestiary.envs.levels import with_levels
from bestiary.evaluation.evaluate import check_playable
from bestiary.runs.loggers import check_loggers
from bestiary.runs.option_sources import merge_sources
from bestiary.studies.analyses import Analysis, read_analyses, trust_analyses
from bestiary.studies.evaluations import EvaluationPlan, read_plans
from bestiary.studies.published_values import PublishedResults, read_published
from bestiary.studies.search import Search, points_to_check, read_search
from bestiary.studies.study_file import (
    FOLDER_NAME,
    FOLDER_NAME_RULE,
    StudyFile,
    VariantDraft,
    draft_variants,
    read_study_file,
    scaled_value,
)
from bestiary.studies.variants import Variant
from bestiary.training.devices import check_devices
from bestiary.training.warm_start import copy_weights
from bestiary.utils.errors import UserError
from bestiary.utils.options import parse_range, suggest
from bestiary.utils.plugin_names import PluginRef, parse_name

KEYS = (
    "name",
    "seeds",
    "evaluate",
    "dashed",
    "zoom",
    "base",
    "grid",
    "variant",
    "search",
    "normalise",
    "analysis",
    "published",
    "scale",
)


BEST = "best"  # name of the variant with the best configuration of a search


@dataclass(frozen=True)
class Study:
    """The content of a study file, with a checked configuration for each variant."""

    path: Path
    text: str  # content of the file
    name: str
    seeds: tuple[int, ...]
    variants: list[Variant]
    normalise: dict[str, tuple[float, float]]  # environment -> (return normalised to 0, return normalised to 1)
    evaluations: tuple[EvaluationPlan, ...] = ()
    analyses: tuple[Analysis, ...] = ()
    published: tuple[PublishedResults, ...] = ()
    dashed: tuple[str, ...] = ()  # variants drawn as a dashed horizontal line at the final return, without a curve
    zoom: tuple[float, float] | None = None  # range of the x axis of an additional panel
    scale: str = ""  # name of the selected scale; empty: the full study
    search: Search | None = None  # a search for the best values of options; None: no search
    # The variant at one point of the search space. It stands for the best variant, which is not known before the search
    # has ended. None: no search.
    search_example: Variant | None = None
    # Function that returns the variant with a given name and given values of the searched options. None: no search.
    point_variant: Callable[[str, Mapping[str, Any]], Variant] | None = None

    @property
    def tasks(self) -> list[str]:
        """The environments of all variants, each once."""
        return list(dict.fromkeys(env for variant in self.variants for env in variant.config.envs))

    def evaluations_of(self, variant: Variant) -> tuple[EvaluationPlan, ...]:
        """Return the evaluations that are made for the runs of a variant."""
        return tuple(plan for plan in self.evaluations if not plan.variants or set(plan.variants) & set(variant.names))


def read_study(path: Path, trust_code: bool = False, scale: str = "") -> Study:
    """Read a study file and check the configurations of all its variants. Raise UserError with all problems found.

    Plug-ins that the user has not used before are executed only if `trust_code` is true. `scale` selects the table
    [scale.NAME] of the file; its name is appended to the name of the study.
    """
    file = read_study_file(path, scale)
    problems: list[str] = []
    for key in set(file.tables) - set(KEYS):
        problems.append(f"{file.location('', key)}: unknown key {key}{suggest(key, KEYS)} (keys: {', '.join(KEYS)})")
    name = file.tables.get("name", path.stem)
    if not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
        problems.append(f"{file.location('', 'name')}: name = {name!r}: {FOLDER_NAME_RULE}")
    seeds = _read_seeds(file, problems)
    normalise = _read_normalise(file, problems)
    search = read_search(file, seeds, problems)
    drafts = draft_variants(file, problems)
    if search is not None:
        drafts = [replace(draft, name=BEST, own_name=BEST, name_without_env=BEST) for draft in drafts]
    names = [name for draft in drafts for name in (draft.name, draft.own_name, draft.name_without_env) if name]
    names = list(dict.fromkeys(names))
    dashed = _read_dashed(file, [draft.name for draft in drafts], problems)
    zoom = _read_zoom(file, problems)
    evaluations = read_plans(file, names, problems)
    analyses = read_analyses(file, names, problems)
    published = read_published(file, names, [plan.name for plan in evaluations], problems)
    if problems:
        raise UserError(*problems)
    trust_analyses(file, analyses, trust_code)
    point_variant = None
    if search is None:
        variants = _resolve_variants(file, drafts, seeds[0], trust_code)
    else:
        search = replace(search, options=drafts[0].options)
        point_variant = partial(_resolve_point, file, drafts[0], search.seed, trust_code)
        points = [_draft_point(drafts[0], f"point {n}", point) for n, point in enumerate(points_to_check(search))]
        variants = _resolve_variants(file, points, search.seed, trust_code)[:1]
        variants = [replace(variants[0], name=BEST, name_without_env=BEST, own_name=BEST)]
        _check_search(file, search, variants[0], normalise)
    study = Study(
        path,
        file.text,
        f"{name}-{scale}" if scale else name,
        seeds,
        variants,
        normalise,
        evaluations,
        analyses,
        published,
        dashed,
        zoom,
        scale,
        search,
        variants[0] if search is not None else None,
        point_variant,
    )
    _check_normalise(file, study.tasks, normalise)
    _check_evaluations(file, study)
    _check_stages(file, study)
    return study


# --- keys of the file ---


def _read_seeds(file: StudyFile, problems: list[str]) -> tuple[int, ...]:
    seeds, location = scaled_value(file, "seeds"), file.location("", "seeds")
    if not isinstance(seeds, list) or not seeds:
        problems.append(f"{location}: seeds: expected a list, such as seeds = [1, 2, 3]")
        return ()
    wrong = [seed for seed in seeds if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63]
    problems += [f"{location}: seeds: {seed!r}: expected an integer >= 0" for seed in wrong]
    duplicates = {seed for seed in seeds if not wrong and seeds.count(seed) > 1}
    problems += [f"{location}: seed {seed} is listed twice" for seed in sorted(duplicates)]
    return tuple(seeds)


def _read_dashed(file: StudyFile, variants: list[str], problems: list[str]) -> tuple[str, ...]:
    dashed, location = file.tables.get("dashed", []), file.location("", "dashed")
    if not isinstance(dashed, list):
        problems.append(f'{location}: dashed = {dashed!r}: expected a list of variants, such as ["a"]')
        return ()
    for name in dashed:
        if name not in variants:
            problems.append(f"{location}: there is no variant {name}{suggest(str(name), variants)}")
    return tuple(dashed)


def _read_zoom(file: StudyFile, problems: list[str]) -> tuple[float, float] | None:
    zoom = scaled_value(file, "zoom")
    if zoom is None:
        return None
    try:
        return parse_range(zoom)
    except ValueError as error:
        problems.append(f"{file.location('', 'zoom')}: zoom = {zoom!r}: {error}")
        return None


def _read_normalise(file: StudyFile, problems: list[str]) -> dict[str, tuple[float, float]]:
    table = file.tables.get("normalise", {})
    if not isinstance(table, Mapping):
        problems.append(
            f"{file.location('', 'normalise')}: normalise: expected a table [normalise] with a key for each environment"
        )
        return {}
    ranges = {}
    for env, value in table.items():
        is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
        if not is_pair or value[0] == value[1]:
            location = file.location("normalise", env.replace("-", "_"))
            problems.append(
                f"{location}: {env} = {value!r}: expected the returns that count as 0 and as 1, such as [0, 50]"
            )
            continue
        name = parse_name(env)
        key = name.absolute() if isinstance(name, PluginRef) else env  # variants name plug-ins by absolute paths
        ranges[key] = (float(value[0]), float(value[1]))
    return ranges


def _check_normalise(file: StudyFile, envs: list[str], normalise: dict[str, tuple[float, float]]) -> None:
    """Raise UserError if the study has a table [normalise] whose keys are not exactly the study's environments."""
    missing = [env for env in envs if normalise and env not in normalise]
    unknown = [env for env in normalise if env not in envs]
    if missing:
        raise UserError(f"{file.location('normalise')}: [normalise] has no entry for {', '.join(missing)}")
    if unknown:
        location = file.location("normalise", unknown[0].replace("-", "_"))
        raise UserError(f"{location}: no variant uses the environment {unknown[0]}{suggest(unknown[0], envs)}")


def _check_evaluations(file: StudyFile, study: Study) -> None:
    """Raise UserError if a variant cannot be evaluated in the environments or levels of an evaluation."""
    for number, plan in enumerate(study.evaluations):
        for variant in study.variants:
            if plan not in study.evaluations_of(variant):
                continue
            try:
                check_playable(variant.config, plan.env)
            except UserError as error:
                location = file.location(f"evaluate {number}", "env")
                raise UserError(f"{location}: {error} (variant {variant.name})") from error
            for levels in plan.levels:
                location = file.location(f"evaluate {number}", "levels")
                with_levels(variant.config.envs[0], variant.config.env_options, levels, f"{location}: levels")


def _check_stages(file: StudyFile, study: Study) -> None:
    """Raise UserError if a variant cannot start from the weights of the variant given by its key `after`."""
    for variant in study.variants:
        if variant.after is None:
            continue
        source = variant.after.config
        try:
            copy_weights(
                variant.config.make_agent(),
                variant.config.interface,
                source,
                source.make_agent().state_dict(),
                f"after = {variant.after.name}",
            )
        except UserError as error:
            raise UserError(f"{file.path}: variant {variant.name}: {error}") from error


# --- from drafts to configurations ---


def _resolve_variants(file: StudyFile, drafts: list[VariantDraft], seed: int, trust_code: bool) -> list[Variant]:
    """Return the variants with their configurations. If drafts have problems, raise UserError with all problems.

    A problem that several drafts have is listed once.
    """
    variants: list[Variant] = []
    variants_by_problem: dict[str, list[str]] = {}
    for draft in drafts:
        try:
            earlier = {variant.name: variant for variant in variants}
            variants.append(_resolve_variant(file, draft, earlier, seed, trust_code))
        except UserError as error:
            for problem in error.problems:
                located = f"{_locate_problem(file, problem, draft)}: {problem}"
                variants_by_problem.setdefault(located, []).append(draft.name)
    lines = [text + _affected_variants(names, len(drafts)) for text, names in variants_by_problem.items()]
    for first, second in itertools.combinations(variants, 2):
        if first.config == second.config and first.after is second.after:
            lines.append(f"{file.path}: variants {first.name} and {second.name} have the same configuration")
    if lines:
        raise UserError(*lines)
    return variants


def _resolve_variant(
    file: StudyFile, draft: VariantDraft, earlier: Mapping[str, Variant], seed: int, trust_code: bool
) -> Variant:
    """Return the variant of a draft. Check its configuration and build its agent, so that errors are found early.

    `earlier` contains the variants that precede this variant in the file: name -> variant. `draft.after` must be the
    name of one of them.
    """
    options, origin = merge_sources({**draft.options, "seed": seed}, trust_code=trust_code, study=str(file.path))
    config = resolve(options, origin)
    check_loggers(config)
    check_devices(config)
    agent = config.make_agent()
    return Variant(
        draft.name,
        draft.name_without_env,
        draft.own_name,
        draft.grid_point,
        config,
        count_parameters(agent),
        earlier.get(draft.after),
    )


def _draft_point(draft: VariantDraft, name: str, point: Mapping[str, Any]) -> VariantDraft:
    """Return the draft of a search trial: [base] with the values in `point`."""
    return replace(draft, name=name, tables={**draft.tables, "search space": dict(point)})


def _resolve_point(
    file: StudyFile, draft: VariantDraft, seed: int, trust_code: bool, name: str, point: Mapping[str, Any]
) -> Variant:
    return _resolve_variants(file, [_draft_point(draft, name, point)], seed, trust_code)[0]


def _check_search(
    file: StudyFile, search: Search, variant: Variant, normalise: Mapping[str, tuple[float, float]]
) -> None:
    """Raise UserError if several tasks have no score ranges, or if keys of [search] do not fit the options of runs."""
    envs, training = variant.config.envs, variant.config.training
    if len(envs) > 1 and not all(env in normalise or lookup_score_range(env) is not None for env in envs):
        raise UserError(
            f"{file.location('search')}: the returns of {', '.join(envs)} are not comparable, so a search cannot "
            "average them; add a table [normalise] with the returns that count as 0 and as 1"
        )
    if search.value == "validation" and not training.valid_every:
        raise UserError(
            f'{file.location("search", "value")}: value = "validation": the runs have no validation; add valid_every '
            f'to [base], for example valid_every = {max(1, (training.steps or 0) // 10)}, or use value = "training"'
        )
    if search.interval and search.value == "validation":
        raise UserError(
            f'{file.location("search", "interval")}: interval cannot be combined with value = "validation"; remove '
            f"interval. The search reads a value after each validation, every {training.valid_every} steps "
            "(valid_every)"
        )


def _locate_problem(file: StudyFile, problem: str, draft: VariantDraft) -> str:
    """Return the location of the option in the study file that probably caused the error message `problem`.

    Search in this order:
    1. a flag in the message, such as --frame-stack, that is also an option of the draft
    2. an option of the draft whose value occurs in the message

    If neither is found, return the path of the file.
    """
    message = re.split("; did you mean|: it is an option of", problem)[0]
    flags = [flag.replace("-", "_") for flag in re.findall(r"--([\w.-]*\w)", message)]
    entries: list[tuple[str, str, Any]] = [
        (table, key, value) for table, options in draft.tables.items() for key, value in options.items()
    ][::-1]
    for flag, (table, key, _) in itertools.product(flags, entries):
        if key == flag or key.endswith(f".{flag}") or flag.endswith(f".{key}"):
            return file.location(table, key)
    for table, key, value in entries:
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, str) and len(v) > 2 and v in message for v in values):
            return file.location(table, key)
    return str(file.path)


def _affected_variants(names: list[str], total: int) -> str:
    """Return the end of an error message: the names of at most three variants that have the problem.

    If all variants have the problem, return an empty string.
    """
    if len(names) == total:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (variant {', '.join(names[:3])}{more})"
