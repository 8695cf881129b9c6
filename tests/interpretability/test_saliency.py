"""Saliency: scores against the published formula, the position of the maximum, drawing, and the written files."""

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn as nn

import bestiary
from bestiary.agents.agent import BasicAgent, Output
from bestiary.agents.distributions import Categorical
from bestiary.cli.main import run_command
from bestiary.evaluation.playback import Playback, PlaybackOptions, open_viewer
from bestiary.interpretability import saliency as saliency_module
from bestiary.interpretability.overlays import overlay_colours
from bestiary.interpretability.saliency import (
    Saliency,
    SaliencyOptions,
    absolute_scale,
    interpolate_grid,
    quantile_scale,
)
from bestiary.interpretability.saliency_video import SaliencyStyle, draw_saliency, render_saliency
from bestiary.interpretability.side_by_side import record_side_by_side
from bestiary.rollout import ActionSpec, ArraySpec, Inputs
from bestiary.runs.run import Run
from bestiary.studies.folder_report import render_missing
from bestiary.utils.errors import UserError

SPEC = {"image": ArraySpec((2, 84, 84), "uint8")}


class OnePixel(nn.Module):
    """Agent whose policy and value each depend on one pixel of the newest frame, multiplied by the recurrent state."""

    def __init__(self, policy=(20, 60), value=(61, 12), uint8_only=False):
        super().__init__()
        self.policy = policy
        self.value = value
        self.uint8_only = uint8_only

    def initial_state(self, batch_size):
        return (torch.ones(batch_size, 1),)

    def forward(self, inputs, state):
        image = inputs.observation["image"]
        if self.uint8_only and image.dtype != torch.uint8:
            raise TypeError("expected uint8")
        image = image[0].float() / 255  # [B,C,H,W]
        logit = image[:, -1, self.policy[0], self.policy[1]] * state[0][:, 0]
        logits = torch.stack([logit, torch.zeros_like(logit)], dim=-1)
        value = image[:, -1, self.value[0], self.value[1]] * state[0][:, 0]
        return Output(Categorical(logits[None]), value[None]), state


TINY: dict[str, Any] = {"steps": 80, "num_envs": 4, "batch_size": 4, "runtime": "serial"}
PARTIAL_VIEW_ENV = """
import gymnasium
import numpy as np

class PartialView(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.screen = np.zeros((32, 32, 3), np.uint8)
        self.screen[:24, :24] = 255

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.screen[16:, 16:], {}

    def step(self, action):
        self.t += 1
        return self.screen[16:, 16:], 0.0, self.t == 9, False, {}

    def render(self):
        return self.screen
"""


def one_step_inputs(image):
    """Return the inputs [1,1,...] of one step with this image."""
    one = torch.zeros(1, 1)
    return Inputs({"image": torch.as_tensor(image)[None, None]}, one, one.bool(), one.long(), one.long())


def noise(shape=(2, 84, 84)):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("density", [1, 3])
def test_maximum_is_at_the_pixel_that_the_output_depends_on(density):
    agent = OnePixel((21, 60), (60, 12))
    maps = Saliency(agent, SPEC, SaliencyOptions(density, radius=2.0))(one_step_inputs(noise()), agent.initial_state(1))
    for scores, (row, column) in ((maps.policy, agent.policy), (maps.value, agent.value)):
        assert np.unravel_index(scores.argmax(), scores.shape) == (row // density, column // density)
        pixels = interpolate_grid(scores, density, (84, 84))
        assert np.unravel_index(pixels.argmax(), pixels.shape) == (row, column)
        assert pixels.max() == pytest.approx(scores.max())
        far = np.abs(np.arange(84) - row) > 12
        assert (pixels[far] == 0).all()


def test_patch_and_blur_are_scaled_with_the_image():
    spec = {"image": ArraySpec((2, 10, 7), "uint8")}
    agent = OnePixel((3, 5), (8, 1))
    saliency = Saliency(agent, spec, SaliencyOptions(1))
    assert (saliency.radius, saliency.blur) == (0.5, 1.0)
    masks, _, _ = saliency.masks(torch.tensor([(5, 3)]))
    assert (masks > 0.25).sum() <= 5
    maps = saliency(one_step_inputs(noise((2, 10, 7))), agent.initial_state(1))
    assert np.unravel_index(maps.policy.argmax(), (10, 7)) == (3, 5)
    assert np.unravel_index(maps.value.argmax(), (10, 7)) == (8, 1)
    standard, screen = (Saliency(agent, {"image": ArraySpec((1, *size), "uint8")}) for size in ((84, 84), (210, 168)))
    assert (standard.radius, standard.blur) == (2.0, 3.0)
    assert (screen.radius, screen.blur) == (4.0, 6.0)
    assert Saliency(agent, spec, SaliencyOptions(radius=2.0)).radius == 2.0


def test_presets_have_the_published_sizes():
    """Greydanus et al. use density 5 and radius 5 for images of 80x80, the fork of TorchBeast 2 and 2 for 84x84."""

    def sizes(side, **options):
        spec = {"image": ArraySpec((1, side, side), "uint8")}
        saliency = Saliency(OnePixel(), spec, SaliencyOptions(**options))
        return saliency.density, saliency.radius, saliency.blur

    assert sizes(80, preset="greydanus") == (5, 5.0, 3.0)
    assert sizes(160, preset="greydanus") == (10, 10.0, 6.0)
    assert sizes(160, preset="greydanus", density=3, radius=4.0) == (3, 4.0, 6.0)
    assert sizes(84, preset="torchbeast-popart") == sizes(84) == (2, 2.0, 3.0)


def test_preset_on_the_command_line(catch_runs: list[Run]) -> None:
    command = f"look saliency {catch_runs[0].path} --length 1 --preset greydanus --out preset.png".split()
    assert run_command(command) == 0
    with np.load("preset.npz") as found:
        protocol = json.loads(str(found["protocol"]))
    assert protocol["preset"] == "greydanus"
    assert protocol["radius"] == 0.5  # 5 / 80 of the smaller side, 5 pixels, but at least 0.5


@pytest.mark.parametrize("pixel", [(3, 5), (5, 3), (8, 1)])
def test_default_density_of_a_small_image_is_one_patch_per_pixel(pixel):
    agent = OnePixel(pixel, (0, 0))
    saliency = Saliency(agent, {"image": ArraySpec((2, 10, 7), "uint8")})
    maps = saliency(one_step_inputs(noise((2, 10, 7))), agent.initial_state(1))
    assert np.unravel_index(maps.policy.argmax(), maps.policy.shape) == pixel
    assert saliency.density == 1
    coarse = SaliencyOptions(default_density=4.0)
    sizes = {
        side: Saliency(agent, {"image": ArraySpec((1, side, side), "uint8")}, coarse).density for side in (84, 42, 210)
    }
    assert sizes == {84: 4, 42: 2, 210: 10}
    assert Saliency(agent, SPEC).density == 2


def test_maximum_is_at_the_corresponding_pixel_of_the_screen():
    """The agent observes a screen of 210x160 as 84x84: row 20 of its image is near row 51 of the screen."""
    agent = OnePixel((20, 60), (60, 12))
    saliency = Saliency(agent, SPEC, SaliencyOptions(2))
    maps = saliency(one_step_inputs(noise()), agent.initial_state(1))
    full = {"policy": maps.policy.max(), "value": maps.value.max()}
    screen = draw_saliency(np.zeros((210, 160, 3), np.uint8), maps, saliency, SaliencyStyle(), full)
    for channel, (row, column) in ((0, agent.policy), (1, agent.value)):
        y, x = np.unravel_index(screen[..., channel].argmax(), (210, 160))
        assert abs(y - (row + 0.5) * 210 / 84) <= 2
        assert abs(x - (column + 0.5) * 160 / 84) <= 2
    assert (screen[..., 2] == 0).all()


def test_score_equals_the_published_formula():
    """Compare one patch with a direct implementation that uses SciPy filters."""
    agent, image = OnePixel(), noise()
    saliency = Saliency(agent, SPEC, SaliencyOptions(1, radius=2.0))
    maps = saliency(one_step_inputs(image), (torch.full((1, 1), 0.5),))
    y, x = 21, 59
    cross = np.zeros((84, 84))
    for dy, dx in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)):
        cross[y + dy, x + dx] = 1
    mask = scipy.ndimage.gaussian_filter(cross, 2.0)
    mask /= mask.max()
    blurred = scipy.ndimage.gaussian_filter(image[-1] / 255, 3.0)
    changed = image[-1] / 255 * (1 - mask) + blurred * mask
    expected = 0.5 * (0.5 * (changed[20, 60] - image[-1, 20, 60] / 255)) ** 2  # the inner 0.5 is the recurrent state
    assert maps.policy[y, x] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("radius", [2.0, 5.0, 30.0])
@pytest.mark.parametrize("point", [(0, 0), (0, 40), (83, 83), (40, 41)])
def test_masks_equal_filtered_crosses_also_at_the_border(point, radius):
    cross = np.zeros((84, 84))
    for dy, dx in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)):
        if 0 <= point[0] + dy < 84 and 0 <= point[1] + dx < 84:
            cross[point[0] + dy, point[1] + dx] = 1
    expected = scipy.ndimage.gaussian_filter(cross, radius)
    masks, y, x = Saliency(OnePixel(), SPEC, SaliencyOptions(radius=radius)).masks(torch.tensor([point]))
    mask = np.zeros((84, 84))
    mask[y[0], x[0]] = masks[0]
    np.testing.assert_allclose(mask, expected / expected.max(), atol=1e-5)


def test_batch_size_is_bounded_and_does_not_change_the_scores(monkeypatch):
    agent, sizes = OnePixel(), []
    whole = Saliency(agent, SPEC, SaliencyOptions(4))(one_step_inputs(noise()), agent.initial_state(1))
    monkeypatch.setattr(saliency_module, "MAX_BATCH_BYTES", 2**20)
    run_agent = Saliency._run_agent

    def counted(self, images, *rest):
        sizes.append(len(images))
        return run_agent(self, images, *rest)

    monkeypatch.setattr(Saliency, "_run_agent", counted)
    small_batches = Saliency(agent, SPEC, SaliencyOptions(4))(one_step_inputs(noise()), agent.initial_state(1))
    np.testing.assert_allclose(small_batches.policy, whole.policy, rtol=1e-5, atol=1e-9)
    assert max(sizes) <= 1 + 2**20 // (4 * 2 * 84 * 84)
    assert len(sizes) > 10


@pytest.mark.parametrize("distance", ["logits", "kl"])
def test_blank_image_and_constant_agent_have_zero_scores_and_no_colour(distance):
    agent, options = OnePixel(), SaliencyOptions(6, distance=distance)
    blank = Saliency(agent, SPEC, options)(one_step_inputs(np.full((2, 84, 84), 90, np.uint8)), agent.initial_state(1))
    constant = Saliency(agent, SPEC, options)(one_step_inputs(noise()), (torch.zeros(1, 1),))
    image = noise((210, 160, 3))
    for maps in (blank, constant):
        assert (maps.policy == 0).all()
        assert (maps.value == 0).all()
        for scale in ("absolute", "quantile"):
            style = SaliencyStyle(scale=scale)
            saliency = Saliency(agent, SPEC, SaliencyOptions(6))
            assert (draw_saliency(image, maps, saliency, style, {"policy": 0.0, "value": 0.0}) == image).all()


def test_kl_is_zero_if_logits_do_not_change():
    """Rounding errors of the divergence are not scores: one pixel differs by one, and the agent is a real network."""
    torch.manual_seed(0)
    agent = BasicAgent(SPEC, ActionSpec(("a", "b", "c")), BasicAgent.Options(init="torch"))
    image = np.full((2, 84, 84), 90, np.uint8)
    image[:, 40, 40] = 91
    by = {
        d: Saliency(agent, SPEC, SaliencyOptions(6, distance=d))(one_step_inputs(image), ()).policy
        for d in ("logits", "kl")
    }
    assert (by["logits"] == 0).sum() > 100
    assert ((by["kl"] == 0) | (by["logits"] > 0)).all()


def test_searchlight_and_kl_have_their_extremum_at_the_same_pixel():
    agent = OnePixel()
    searchlight = Saliency(agent, SPEC, SaliencyOptions(2, mode="searchlight"))(
        one_step_inputs(noise()), agent.initial_state(1)
    )
    # The patch that contains the pixel keeps it sharp, so the policy changes least.
    assert searchlight.policy[10, 30] == searchlight.policy.min() < searchlight.policy.max()
    kl = Saliency(agent, SPEC, SaliencyOptions(2, distance="kl"))(one_step_inputs(noise()), agent.initial_state(1))
    assert np.unravel_index(kl.policy.argmax(), kl.policy.shape) == (10, 30)


def test_agent_that_requires_uint8_images():
    agent = OnePixel(uint8_only=True)
    maps = Saliency(agent, SPEC, SaliencyOptions(2))(one_step_inputs(noise()), agent.initial_state(1))
    assert np.unravel_index(maps.policy.argmax(), maps.policy.shape) == (10, 30)


def test_overlaid_colours_are_clipped_and_visible_on_white():
    heat = np.ones((4, 4))
    both = overlay_colours(np.full((4, 4, 3), 250, np.uint8), [(heat, (255, 0, 0)), (heat, (0, 255, 0))])
    assert (both[..., :2] == 255).all()
    assert (both[..., 2] < 150).all()


def test_quantile_scale_colours_a_tenth_and_absolute_scale_depends_on_the_scores():
    scores = np.arange(1000.0).reshape(20, 50)
    assert (quantile_scale(scores) > 0).mean() == pytest.approx(0.1, abs=0.01)
    assert (quantile_scale(scores / 1e6) > 0).mean() == pytest.approx(0.1, abs=0.01)
    assert absolute_scale(scores, 500.0).max() == 1
    assert absolute_scale(scores / 1e6, 500.0).max() < 1e-5
    sparse = np.zeros((20, 20))
    sparse[3, 4] = 1e-3
    assert (quantile_scale(sparse) > 0).sum() == 1


def test_saliency_of_the_zoo_agent_for_pong(capsys):
    """The video has the size of the screen, and the scores are written to an .npz file with the same name."""
    run = bestiary.load("zoo/pong")
    options, style = SaliencyOptions(density=12), SaliencyStyle(full=(1.0, 0.5))
    playback = PlaybackOptions(start=30, length=2, checkpoint=1_000_000)
    (path,) = render_saliency(run, playback, out="pong.mp4", saliency_options=options, style=style)
    assert "1200000" in capsys.readouterr().err  # the nearest checkpoint
    assert np.stack(list(imageio.imiter(path))).shape == (2, 210, 160, 3)
    with np.load("pong.npz", allow_pickle=False) as found:
        assert found["policy"].shape == found["value"].shape == (2, 7, 7)
        assert found["step"].tolist() == [30, 31]
        assert (found["policy"] >= 0).all()
        assert found["policy"].max() > 0
        protocol = json.loads(str(found["protocol"]))
    assert protocol["full"] == {"policy": 1.0, "value": 0.5}
    assert protocol["density"] == 12
    assert protocol["environment_options"]["noop_max"] == 30
    playback = PlaybackOptions(start=30, length=2)
    again = render_saliency(run, playback, out="again.png", saliency_options=options, style=style)
    assert again == sorted(Path().glob("again*.png")) == [Path("again-00030.png"), Path("again-00031.png")]
    with np.load("again.npz") as one, np.load("pong.npz") as other:
        assert (one["policy"] == other["policy"]).all()


def test_impossible_requests_are_refused(catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    toy = bestiary.train("toy/chain", run_dir="chain", steps=160, num_envs=4, batch_size=4, runtime="serial")
    with pytest.raises(UserError, match=r"chain: the agent observes vector and no images.*bestiary video"):
        render_saliency(toy)
    monkeypatch.setattr(Saliency, "__call__", None)  # all agents are checked before any saliency is computed
    with pytest.raises(UserError, match="chain: the agent observes vector"):
        record_side_by_side([catch_runs[0], toy], out="both.gif", saliency=True)
    with pytest.raises(UserError, match=r"--start 500: .* 9 steps"):
        render_saliency(catch_runs[0], PlaybackOptions(start=500))
    with pytest.raises(UserError, match=r"--density 9: .*10x5"):
        render_saliency(catch_runs[0], saliency_options=SaliencyOptions(9))
    with pytest.raises(UserError, match=r"\.avi: .*\.gif or \.mp4 or \.png"):
        render_saliency(catch_runs[0], out="a.avi")


def test_numbered_images_are_overwritten_only_with_overwrite(
    catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"look saliency {catch_runs[0].path} --start 2 --length 3 --density 5 --out ow.png".split()
    Path("ow-00004.png").write_text("precious")
    Path("ow-final.png").write_text("not numbered")
    assert run_command(command) == 2
    errors = capsys.readouterr().err
    assert "ow-00004.png exists" in errors
    assert "--overwrite" in errors
    assert Path("ow-00004.png").read_text() == "precious"
    assert run_command([*command, "--overwrite"]) == 0
    assert "ow-00002.png to ow-00004.png" in capsys.readouterr().out
    assert imageio.imread("ow-00004.png").shape == (210, 105, 3)


def test_frame_has_the_recurrent_state_before_its_step() -> None:
    """Compare with the state of a second agent that processes the same inputs."""
    run = bestiary.train("toy/catch", run_dir="gru", memory="gru", **TINY)
    viewer, state = open_viewer(run), run.agent().initial_state(1)
    agent, nonzero = run.agent(), 0
    for (frame,) in Playback([viewer], length=7):
        record = frame.record
        assert all(torch.equal(own, expected) for own, expected in zip(record.state, state, strict=True))
        with torch.no_grad():
            _, state = agent(record.inputs, state)
        nonzero += int(any(tensor.abs().max() > 0 for tensor in record.state))
    assert nonzero == 6  # all but the initial state


def test_value_saliency_belongs_to_the_task_that_is_played() -> None:
    run = bestiary.train("procgen/{maze,leaper}:easy", run_dir="two", critic="popart", **{**TINY, "torso": "mlp"})
    playback = PlaybackOptions(env="procgen/leaper:easy", length=1)
    render_saliency(run, playback, saliency_options=SaliencyOptions(16), out="leaper.png")
    viewer = open_viewer(run, env="procgen/leaper:easy")
    ((frame,),) = Playback([viewer], length=1)
    saliency = Saliency(run.agent(), viewer.pool.observation_spec, SaliencyOptions(16))
    values, maps = [], []
    for task in (0, 1):
        frame.record.inputs.task = torch.full((1, 1), task)
        maps.append(saliency(frame.record.inputs, frame.record.state).value)
        values.append(run.agent()(frame.record.inputs, frame.record.state)[0].value.item())
    with np.load("leaper.npz") as found:
        np.testing.assert_allclose(found["value"][0], maps[1], rtol=1e-4)
        assert not np.allclose(found["value"][0], maps[0], rtol=1e-2)
        assert found["value_estimate"][0] == pytest.approx(values[1], rel=1e-4)


def test_saliency_is_drawn_over_the_observation_if_the_screen_shows_something_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The agent observes the lower right quarter of the screen, so saliency is drawn over its observation."""
    Path("part.py").write_text(PARTIAL_VIEW_ENV)
    run = bestiary.train("part.py:PartialView", run_dir="part", **{**TINY, "torso": "mlp"})
    capsys.readouterr()
    style = SaliencyStyle(full=(1e9, 1e9))
    render_saliency(run, PlaybackOptions(length=1), out="part.png", style=style)
    image = imageio.imread("part.png")
    assert (image[:104, :104] > 200).all()  # white above and left, as in the observation
    assert (image[110:, 110:] < 50).all()
    assert "note: the screen of" in capsys.readouterr().err
    assert run_command("video part --saliency --length 2 --out both.gif".split()) == 0


def test_image_and_video_of_the_same_step_have_different_names(catch_runs: list[Run], tmp_path: Path) -> None:
    """An image and a video of the same step each have an .npz file with the same name."""
    run = bestiary.train("toy/catch", run_dir="own", **TINY)
    render_missing(run)
    (video,) = render_saliency(run, PlaybackOptions(length=2))
    files = {path.name for path in video.parent.iterdir()}
    assert {name.split(".")[0] for name in files} == {"saliency-000000000080-0", "saliency-000000000080-0-2"}
    assert len(files) == 4
    again = bestiary.train("toy/catch", run_dir="again", **TINY)
    render_saliency(again, PlaybackOptions(length=2))
    render_missing(again)
    assert len(list((again.path / "interpretability").glob("*.png"))) == 1


def test_saliency_of_an_agent_with_memory_on_small_images(catch_runs: list[Run]) -> None:
    run = bestiary.train(
        "toy/catch", run_dir="lstm", steps=160, num_envs=4, batch_size=4, runtime="serial", memory="lstm"
    )
    (path,) = render_saliency(run, PlaybackOptions(length=3), saliency_options=SaliencyOptions(1), out="catch.gif")
    with np.load("catch.npz") as found:
        assert json.loads(str(found["protocol"]))["radius"] == 0.5
    assert imageio.imread(path, index=None).shape[1:] == (210, 105, 3)
