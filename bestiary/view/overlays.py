"""Pictures of a watched game with saliency or attention maps."""

from collections.abc import Sequence

import numpy as np

from bestiary.interpretability.attention import attention_map
from bestiary.interpretability.overlays import overlay_map
from bestiary.interpretability.saliency import Saliency, SaliencyMaps, SaliencyOptions
from bestiary.interpretability.saliency_video import SaliencyStyle, draw_saliency, full_colour_scores
from bestiary.view.game import WatchedGame, encode_png

NO_OVERLAY = "none"
SALIENCY = {"saliency: policy": "policy", "saliency: value": "value", "saliency: both": "both"}
ATTENTION = "attention: "
MAX_MAPS = 4_000  # maximum number of saliency maps in memory
DENSITY = 4.0  # distance of saliency patches, in pixels of an image of 84x84 pixels


class Overlays:
    """Draws overlays of a game. Saliency maps are kept, because they take long to compute."""

    def __init__(self, game: WatchedGame):
        self.game = game
        self.saliencies: dict[int, Saliency] = {}  # by index of the agent
        self.maps: dict[tuple[int, int], SaliencyMaps] = {}  # by index of the agent, and step

    def kinds(self) -> list[str]:
        """Return the names of the overlays that the first agent has."""
        viewer = self.game.main.viewer
        names = [NO_OVERLAY]
        if "image" in viewer.pool.observation_spec:
            names += list(SALIENCY)
        if getattr(viewer.agent, "has_attention", False):
            weights = self.game.main.record.output.extras["attention"][0, 0]
            names += [f"{ATTENTION}all heads", *(f"{ATTENTION}head {k + 1}" for k in range(len(weights)))]
        return names

    def forget_from(self, t: int) -> None:
        """Forget the maps of step `t` and later steps, because the game is continued in another way from step `t`."""
        self.maps = {key: maps for key, maps in self.maps.items() if key[1] < t}

    def is_ready(self, kind: str, t: int) -> bool:
        """Return whether the overlay of a step can be drawn without computing saliency maps first."""
        agents = range(len(self.game.branches))
        return kind not in SALIENCY or all((agent, t) in self.maps for agent in agents)

    def saliency_maps(self, t: int, agent: int = 0) -> SaliencyMaps:
        """Return the saliency maps of a step."""
        if (agent, t) not in self.maps:
            if agent not in self.saliencies:
                viewer = self.game.branches[agent].viewer
                options = SaliencyOptions(default_density=DENSITY)
                self.saliencies[agent] = Saliency(viewer.agent, viewer.pool.observation_spec, options)
            record = self.game.records_at(t)[agent]
            self.maps[agent, t] = self.saliencies[agent](record.inputs, record.state)
            while len(self.maps) > MAX_MAPS:
                del self.maps[next(iter(self.maps))]
        return self.maps[agent, t]

    def picture(self, kind: str, t: int, agent: int = 0) -> bytes:
        """Return the picture of a step with an overlay, as a PNG file."""
        if kind in SALIENCY:
            self.saliency_maps(t, agent)
            return encode_png(self._draw_saliency(SALIENCY[kind], t, agent))
        if kind.startswith(ATTENTION):
            return encode_png(self._draw_attention(kind, t, agent))
        return self.game.steps[t].png

    def _draw_saliency(self, output: str, t: int, agent: int) -> np.ndarray:
        style = SaliencyStyle(output=output, palette="orange-blue")
        known: Sequence[SaliencyMaps] = [maps for (own, _), maps in self.maps.items() if own == agent]
        full = full_colour_scores(known, style)
        return draw_saliency(self.game.canvas(t, agent), self.maps[agent, t], self.saliencies[agent], style, full)

    def _draw_attention(self, kind: str, t: int, agent: int) -> np.ndarray:
        branch = self.game.branches[agent]
        record = self.game.records_at(t)[agent]
        if "attention" not in record.output.extras:
            return self.game.canvas(t, agent)
        weights = record.output.extras["attention"][0, 0].numpy()
        name = kind.removeprefix(ATTENTION)
        if name != "all heads":
            head = int(name.removeprefix("head ")) - 1
            weights = weights[head : head + 1] if head < len(weights) else weights
        return overlay_map(self.game.canvas(t, agent), *attention_map(weights, branch.viewer.agent, branch.viewer.pool))
