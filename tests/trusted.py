"""Configurations with plug-ins in tests: the test is the user who names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bestiary.config.config import Config
from bestiary.config.plugin_options import trust_named
from bestiary.config.resolve import resolve
from bestiary.utils import plugins, trust
from bestiary.utils.plugin_names import PluginRef


def resolve_own(given: Mapping[str, Any]) -> Config:
    """Return the config of options that the user has given on the command line."""
    return resolve(trust_named(given))


def load_own(file: Path | str, name: str, kind: str) -> Any:
    """Import a plug-in that the user has named."""
    ref = PluginRef(Path(file), name)
    trust.trust_named(ref)
    return plugins.load(ref, kind)
