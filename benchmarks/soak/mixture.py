"""The small training runs of the soak test (MIXTURE), and the callback that slows them down."""

from dataclasses import dataclass
from pathlib import Path

# A pause after each update keeps the CPU load low and makes the runs long enough for faults.
PACE_VARIABLE = "SOAK_SECONDS_PER_UPDATE"
PACE_FILE = "pace.py"
PACE_CALLBACK = f"""
import os, time
from bestiary.training.callbacks.base import Callback


class Pace(Callback):
    def on_update(self, session, metrics, episodes):
        time.sleep(float(os.environ.get("{PACE_VARIABLE}", "0")) * len(metrics))
"""

LOG_EVERY = 400  # interval between rows of metrics.csv, in steps
COMMON = (
    *("--num-envs", "8", "--rollout-length", "10", "--micro-batch-size", "2"),
    *("--torso.width", "16", "--log-every", str(LOG_EVERY), "--save-minutes", "0.05", "--save-every", "10k"),
)


@dataclass(frozen=True)
class Variant:
    """One training configuration of the soak test."""

    name: str
    options: tuple[str, ...]
    steps: int
    max_row_gap: int  # maximum number of steps between two rows of metrics.csv
    is_exact: bool = False  # whether a resumed run equals the uninterrupted run bit for bit

    def train_command(self, run: Path, pace: Path) -> list[str]:
        """Return the arguments of the command that starts a run in the folder `run`."""
        return [
            *("train", *self.options, *COMMON, "--steps", str(self.steps)),
            *("--callback", f"{pace}:Pace", "--run-dir", str(run)),
        ]


MIXTURE = (
    Variant(
        "serial-lstm",
        ("toy/recall", "--memory", "lstm", "--memory.hidden", "8", "--runtime", "serial"),
        24_000,
        LOG_EVERY + 80,
        is_exact=True,
    ),
    Variant(
        "serial-ppo",
        (
            *("toy/catch", "--algo", "ppo", "--algo.sequence-length", "10", "--algo.minibatches", "2"),
            *("--runtime", "serial"),
        ),
        24_000,
        LOG_EVERY + 80,
        is_exact=True,
    ),
    Variant("local-impala", ("toy/catch", "--runtime", "local"), 24_000, LOG_EVERY + 80),
    Variant("local-popart", ("toy/catch", "--critic", "popart", "--runtime", "local"), 24_000, LOG_EVERY + 80),
)
CLUSTER_VARIANT = Variant("cluster", ("toy/catch", "--cluster", "local", "--actors", "1"), 12_000, LOG_EVERY + 80)
