"""Labelled quantities: named numbers of the state of a game, for example the position of the ball.

An environment declares its quantities in `EnvInterface.labels`. `VectorEnv.read_labels` returns their values and
`VectorEnv.set_labels` changes them. Agents do not receive them as inputs. Interpretability tools use them to change a
game in a controlled way, and to test what the layers of a network represent.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    """The properties of one labelled quantity. Its values are whole numbers from `low` to `high`."""

    description: str
    low: float = 0
    high: float = 255
    group: str = ""  # probes report the mean over all quantities of a group; "": the quantity is not in a group
    # The quantity exists only while the value of another quantity (name, lowest, highest value) is inside a range.
    exists_if: tuple[str, float, float] | None = None
    why_not_settable: str = ""  # a sentence for error messages if the quantity cannot be set; "" if it can

    @property
    def settable(self) -> bool:
        return not self.why_not_settable
