"""Variants of a study: configurations whose runs differ only in their seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bestiary.config.config import Config
from bestiary.utils.errors import UserError


@dataclass(frozen=True, eq=False)
class Variant:
    """One configuration of a study. Its runs differ only in their seed."""

    name: str
    name_without_env: str  # `name` without `env=...`; results over tasks combine variants that differ only in `env`
    own_name: str  # name in the [[variant]] table and point of its own grid; empty if the variant has no such table
    grid_point: str  # values of the options of [grid] except `env`, as text; empty if the grid has no other option
    config: Config
    parameters: int  # number of network parameters
    after: "Variant | None" = None  # the variant from whose last checkpoint this one starts; None: random weights

    @property
    def curve_label(self) -> str:
        return self.own_name or self.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which other tables of a study file can refer to this variant."""
        return (self.name, self.name_without_env, self.own_name)

    def with_seed(self, seed: int, eval_at_end: int = 0) -> Config:
        """Return the configuration of the run with this seed.

        If `eval_at_end` is not 0, the agent is evaluated with this number of games after training.
        """
        training = self.config.training
        training = replace(training, seed=seed, eval_at_end=eval_at_end or training.eval_at_end)
        return replace(self.config, training=training)


def select_variants(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Return the variants with these names, in the order of `names`, each once. Without names, return all variants.

    A name may stand for several variants: `single` stands for `single,env=atari-Pong` and `single,env=atari-Carnival`.
    Raise UserError if a name stands for no variant.
    """
    if not names:
        return list(variants)
    chosen: list[Variant] = []
    for name in names:
        own = [variant for variant in variants if name in variant.names]
        if not own:
            raise UserError(f"there is no variant {name}")
        chosen += [variant for variant in own if variant not in chosen]
    return chosen
