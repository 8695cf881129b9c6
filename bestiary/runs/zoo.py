"""The zoo: trained agents that are part of the package. Commands that read a run also accept names like `zoo/pong`.

A zoo agent is a run folder with config.toml, metrics.csv, episodes.csv and one checkpoint. The checkpoint contains only
the weights and state.json, so the agent can be evaluated, recorded and inspected, but not trained further.

    python -m bestiary.runs.zoo runs/pong-1 pong       # add the newest weights of a run as zoo/pong
"""

import shutil
import sys
from pathlib import Path

from bestiary.runs.checkpoints import choose, write_manifest
from bestiary.utils.errors import UserError

ZOO_FOLDER = Path(__file__).resolve().parents[1] / "zoo"


def find_agent(path: Path) -> Path | None:
    """Return the folder of a zoo agent. `path` is the name `zoo/NAME`. Return None if there is no such agent."""
    if path.parent != Path("zoo"):
        return None
    folder = ZOO_FOLDER / path.name
    return folder if (folder / "config.toml").is_file() else None


def agent_names() -> list[str]:
    """Return the names of all zoo agents, in the form zoo/NAME."""
    return sorted(f"zoo/{path.parent.name}" for path in ZOO_FOLDER.glob("*/config.toml"))


def add_agent(run_path: Path, checkpoint: Path, name: str) -> Path:
    """Copy a run with one of its checkpoint folders, `checkpoint`, to the zoo as zoo/NAME. Return the new folder."""
    target = ZOO_FOLDER / name
    if target.exists():
        raise UserError(f"{target} exists already; remove it first")
    weights = target / "checkpoints" / checkpoint.name
    weights.mkdir(parents=True)
    for file in ("config.toml", "metrics.csv", "episodes.csv"):
        shutil.copyfile(run_path / file, target / file)
    files = ("model.safetensors", "state.json")
    for file in files:
        shutil.copyfile(checkpoint / file, weights / file)
    write_manifest(weights, files)
    return target


def _main(arguments: list[str]) -> None:
    # Imported here and not at the top, because runs.run itself imports this module.
    from bestiary.runs.run import open_run

    if len(arguments) != 2:
        sys.exit("usage: python -m bestiary.runs.zoo RUN NAME    (add the newest weights of a run to the zoo)")
    try:
        run = open_run(arguments[0])
        print(add_agent(run.path, choose(run.path).path, arguments[1]))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main(sys.argv[1:])
