"""Command `import`: convert a checkpoint of TorchBeast or of one of its forks."""

from pathlib import Path

from bestiary.cli.arguments import Parser
from bestiary.compat.import_checkpoint import import_checkpoint
from bestiary.runs.run import RunLocation
from bestiary.utils.errors import UserError


def import_command(argv: list[str]) -> None:
    """Convert a checkpoint of TorchBeast or of one of its forks to a run folder."""
    parser = Parser(
        "import",
        "Convert a checkpoint of TorchBeast or of one of its forks to a run folder, which all commands can use. The "
        "page docs/import.md lists the networks and the differences.",
    )
    parser.add_argument("file", metavar="FILE", help="checkpoint of the original program, for example model.tar")
    parser.add_argument(
        "--meta",
        metavar="FILE",
        help="meta.json of the original run, for flags that the checkpoint does not contain",
    )
    parser.add_argument("--logs", metavar="FILE", help="logs.csv of the original run, which becomes metrics.csv")
    parser.add_argument(
        "--env",
        nargs="+",
        default=[],
        metavar="ENV",
        help="environments of the original training, in the same order (required if FILE does not contain them)",
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--name", metavar="NAME", help="name of the new run folder in runs/")
    place.add_argument("--run-dir", metavar="DIR", help="path of the new run folder")
    a = parser.parse_strictly(argv)
    try:
        location = RunLocation(a.name, a.run_dir)
    except ValueError as error:
        raise UserError(str(error)) from error
    import_checkpoint(
        Path(a.file).expanduser(),
        location,
        Path(a.meta).expanduser() if a.meta else None,
        Path(a.logs).expanduser() if a.logs else None,
        a.env,
    )
