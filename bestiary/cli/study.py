"""Command `study`: train all runs described by a study file, and write a report."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.cli.arguments import Parser, add_trust_code
from bestiary.utils.errors import UserError

if TYPE_CHECKING:
    from bestiary.studies.runner import ClusterOptions


def study(argv: list[str]) -> None:
    """Train the runs of a study that are not finished, and write its report."""
    parser = Parser(
        "study",
        "Train the runs of a study that are not finished, and then write a table, learning curves and an HTML page. To "
        "continue an interrupted study, start it again.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="TOML file that describes the study (see docs/studies.md), or published/NAME: a published experiment (to "
        "list all: bestiary list studies)",
    )
    parser.add_argument(
        "--scale",
        metavar="NAME",
        default="",
        help="smaller version of the study, as described by the table [scale.NAME] of its file; for example, "
        "--scale small for a published experiment (default: the full study)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="do not train; list the runs with their progress and network sizes"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="do not train; write the table, learning curves and HTML page of the existing runs",
    )
    parser.add_integer("--jobs", "number of runs that are trained at the same time on this machine", default=1, low=1)
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="train on a Ray cluster: local (start a cluster on this machine), auto (use the cluster that runs on this "
        "machine) or host:port (see docs/cluster.md)",
    )
    parser.add_float("--cpus-per-run", "with --cluster: number of CPUs per run (default: 1)", above=0)
    parser.add_float("--gpus-per-run", "with --cluster: number of GPUs per run, for example 0.25 (default: 0)", low=0)
    parser.add_argument(
        "--trust-open-cluster",
        action="store_true",
        help="with --cluster: connect even if other machines can reach the cluster and it requires no token",
    )
    parser.add_argument(
        "--dir",
        metavar="FOLDER",
        help="folder for the runs and results of the study (default: runs/NAME, with the name of the study)",
    )
    parser.add_argument(
        "--if-changed",
        choices=("error", "new"),
        default="error",
        help="what to do if existing runs have other settings than the study file, because the file was changed; "
        "error: stop with a message; new: rename the folders of these runs and train new runs (default: error)",
    )
    add_trust_code(parser)
    a = parser.parse_strictly(argv)

    from bestiary.studies.runner import run_study

    run_study(
        Path(a.file),
        Path(a.dir) if a.dir else None,
        jobs=a.jobs,
        cluster=_cluster_of(a),
        if_changed=a.if_changed,
        dry_run=a.dry_run,
        report_only=a.report,
        trust_code=a.trust_code,
        scale=a.scale,
    )


def _cluster_of(a: Any) -> "ClusterOptions | None":
    """Return the cluster options, or None without --cluster. Raise UserError if arguments cannot be combined."""
    from bestiary.studies.runner import ClusterOptions

    if a.cluster:
        if a.jobs != 1:
            raise UserError(f"--jobs {a.jobs}: not supported with --cluster; use --cpus-per-run")
        return ClusterOptions(a.cluster, a.cpus_per_run or 1.0, a.gpus_per_run or 0.0, a.trust_open_cluster)
    given = {
        "--cpus-per-run": a.cpus_per_run is not None,
        "--gpus-per-run": a.gpus_per_run is not None,
        "--trust-open-cluster": a.trust_open_cluster,
    }
    if flags := [flag for flag, is_given in given.items() if is_given]:
        raise UserError(*(f"{flag}: has an effect only on a cluster; add --cluster or remove {flag}" for flag in flags))
    return None
