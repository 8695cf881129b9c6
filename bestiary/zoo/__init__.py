"""Trained agents that come with the package: `zoo/pong` is valid wherever a run is.

They are run folders with all that tells how the agent came about (config.toml, metrics.csv, episodes.csv) and of the last
checkpoint only the weights: enough to play, to film, to look inside; not to train on.

    python -m bestiary.zoo runs/pong-1 pong       # how one gets in
"""

import hashlib
import json
import shutil
from pathlib import Path

from bestiary.errors import UserError

FOLDER = Path(__file__).resolve().parent


def find(asked: Path) -> Path | None:
    """The folder of `zoo/NAME`; None where that is not what was asked for, or is not there."""
    if asked.parent != Path("zoo"):
        return None
    return FOLDER / asked.name if (FOLDER / asked.name / "config.toml").is_file() else None


def names() -> list[str]:
    return sorted(f"zoo/{path.parent.name}" for path in FOLDER.glob("*/config.toml"))


def ship(source: Path, checkpoint: Path, name: str) -> Path:
    """Put a run into the zoo, with the weights of one checkpoint."""
    target = FOLDER / name
    if target.exists():
        raise UserError(f"{target} exists already; remove it first")
    weights = target / "checkpoints" / checkpoint.name
    weights.mkdir(parents=True)
    for file in ("config.toml", "metrics.csv", "episodes.csv"):
        shutil.copyfile(source / file, target / file)
    manifest = {}
    for file in ("model.safetensors", "state.json"):
        data = (checkpoint / file).read_bytes()
        (weights / file).write_bytes(data)
        manifest[file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (weights / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return target
