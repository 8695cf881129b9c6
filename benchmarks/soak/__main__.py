"""Command line of the soak test: `python -m benchmarks.soak --hours 2`."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.soak.mixture import CLUSTER_VARIANT, MIXTURE
from benchmarks.soak.soak import Soak


def main() -> int:
    """Run the soak test. Return 1 if an invariant did not hold, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0, help="time during which runs are disturbed (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random decisions (default: 0)")
    parser.add_argument("--cluster", action="store_true", help="also train on a private Ray instance")
    parser.add_argument("--folder", type=Path, help="new folder for the results (default: a temporary folder)")
    parser.add_argument(
        "--seconds-per-update",
        type=float,
        default=0.03,
        help="pause after each update, in seconds, which keeps the CPU load low (default: 0.03)",
    )
    a = parser.parse_args()
    folder = a.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    if a.folder is not None and folder.exists():
        parser.error(f"--folder {folder}: exists already; choose a new folder")
    mixture = (*MIXTURE, CLUSTER_VARIANT) if a.cluster else MIXTURE
    soak = Soak(folder.absolute(), mixture, a.seed, a.seconds_per_update)
    soak.run(3600 * a.hours)
    text = "\n".join(soak.summary())
    (folder / "summary.txt").write_text(f"{text}\n")
    print(text)
    print(f"events: {folder / 'events.csv'}")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
