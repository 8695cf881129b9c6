"""Imports point one way: a module imports only from its own package or from lower layers (CONTRIBUTING.md)."""

import ast
import re
from pathlib import Path

import pytest

import bestiary

ROOT = Path(bestiary.__file__).parent

# From low to high. Packages of one layer do not import each other, except for the utilities of the lowest layer.
LAYERS = [
    {"step", "rollout", "utils"},
    {"envs", "kernels", "loggers"},
    {"agents"},
    {"algorithms"},
    {"config"},
    {"runs"},
    {"evaluation"},
    {"training"},
    {"distributed"},
    {"interpretability", "reward_audit"},
    {"studies", "bench", "compat"},
    {"api", "view"},
    {"cli", "testing"},
    {"__main__"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
ALLOWED_WITHIN_LAYER = {("utils", "rollout"), ("rollout", "utils"), ("rollout", "step")}

MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported_packages(source: str) -> set[str]:
    """Return the top-level names below `bestiary` that a module imports, inside functions too."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        packages |= {name.split(".")[1] for name in names if name.startswith("bestiary.")}
    return packages - {"__version__"}


def test_every_package_has_a_layer() -> None:
    assert {path.parts[0].removesuffix(".py") for path in MODULES} == set(LEVEL)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_downwards(module: Path) -> None:
    own = module.parts[0].removesuffix(".py")
    for package in imported_packages((ROOT / module).read_text()) - {own}:
        downwards = LEVEL[package] < LEVEL[own] or (own, package) in ALLOWED_WITHIN_LAYER
        assert downwards, f"{module} imports bestiary.{package}, which is not in a lower layer"


def test_general_code_does_not_import_single_environments() -> None:
    """Properties of single environments are declared attributes of `EnvSpec`, `EnvInterface` and `VectorEnv`."""
    packages = {"agents", "algorithms", "config", "runs", "evaluation", "training", "distributed", "studies", "api.py"}
    family = re.compile(r"bestiary\.envs(?:\.| import .*)\b(?:atari|procgen|riverraid|toy|warehouse|gymnasium_env)\b.*")
    found = {
        (str(module), line.strip())
        for module in MODULES
        if module.parts[0] in packages
        for line in (ROOT / module).read_text().splitlines()
        if family.search(line)
    }
    # `bestiary eval scripted:NAME` plays policies that exist only for the warehouse.
    assert {module for module, _ in found} <= {"evaluation/evaluate.py"}, found
    assert all("scripted_policies" in line for _, line in found), found


def test_the_package_root_holds_few_modules() -> None:
    assert {path.name for path in MODULES if len(path.parts) == 1} == {"__main__.py", "step.py", "rollout.py", "api.py"}


def test_upward_imports_are_found() -> None:
    assert imported_packages("from bestiary.cli.main import main\nimport bestiary.envs.atari") == {"cli", "envs"}
    assert imported_packages("def f():\n    from bestiary import config") == {"config"}
