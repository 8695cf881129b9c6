"""Saliency: the formula, where its maximum is, in the agent's picture and on the screen, and what becomes of it."""

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
from bestiary.agents.heads import Categorical
from bestiary.analysis import paint, saliency
from bestiary.analysis.look_saliency import Look, look_saliency, painted
from bestiary.analysis.movie import film_together
from bestiary.analysis.report import draw_missing
from bestiary.analysis.saliency import Method, Saliency, fill
from bestiary.analysis.stage import Show, open_stage
from bestiary.cli import run_command
from bestiary.errors import UserError
from bestiary.rollout import ActionSpec, ArraySpec, Inputs
from bestiary.runs.folder import Run

SPEC = {"image": ArraySpec((2, 84, 84), "uint8")}


class OnePixel(nn.Module):
    """Its policy depends on one pixel of the newest frame, its value on another one; both on what it remembers."""

    def __init__(self, policy=(20, 60), value=(61, 12), bytes_only=False):
        super().__init__()
        self.policy, self.value, self.bytes_only = policy, value, bytes_only

    def initial_state(self, batch_size):
        return (torch.ones(batch_size, 1),)

    def forward(self, inputs, state):
        image = inputs.observation["image"]
        if self.bytes_only and image.dtype != torch.uint8:
            raise TypeError("bytes, please")
        image = image[0].float() / 255  # [B,C,H,W]
        light = image[:, -1, self.policy[0], self.policy[1]] * state[0][:, 0]
        logits = torch.stack([light, torch.zeros_like(light)], dim=-1)
        value = image[:, -1, self.value[0], self.value[1]] * state[0][:, 0]
        return Output(Categorical(logits[None]), value[None]), state


TINY: dict[str, Any] = {"steps": 80, "num_envs": 4, "batch_size": 4, "runtime": "serial"}
PART_OF_A_WORLD = """
import gymnasium
import numpy as np

class Part(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode, self.world = render_mode, np.zeros((32, 32, 3), np.uint8)
        self.world[:24, :24] = 255

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.world[16:, 16:], {}

    def step(self, action):
        self.t += 1
        return self.world[16:, 16:], 0.0, self.t == 9, False, {}

    def render(self):
        return self.world
"""


def moment(image):
    one = torch.zeros(1, 1)
    return Inputs({"image": torch.as_tensor(image)[None, None]}, one, one.bool(), one.long(), one.long())


def noise(shape=(2, 84, 84)):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("density", [1, 3])
def test_the_maximum_is_where_the_agent_looks(density):
    agent = OnePixel((21, 60), (60, 12))
    maps = Saliency(agent, SPEC, Method(density, radius=2.0))(moment(noise()), agent.initial_state(1))
    for scores, (row, column) in ((maps.policy, agent.policy), (maps.value, agent.value)):
        assert np.unravel_index(scores.argmax(), scores.shape) == (row // density, column // density)
        pixels = fill(scores, density, (84, 84))
        assert np.unravel_index(pixels.argmax(), pixels.shape) == (row, column)
        assert pixels.max() == pytest.approx(scores.max())
        far = np.abs(np.arange(84) - row) > 12
        assert (pixels[far] == 0).all()


def test_patches_of_small_pictures_are_small():
    spec = {"image": ArraySpec((2, 10, 7), "uint8")}
    agent = OnePixel((3, 5), (8, 1))
    lens = Saliency(agent, spec, Method(1))
    assert (lens.radius, lens.blur) == (0.5, 1.0)
    masks, _, _ = lens.masks(torch.tensor([(5, 3)]))
    assert (masks > 0.25).sum() <= 5
    maps = lens(moment(noise((2, 10, 7))), agent.initial_state(1))
    assert np.unravel_index(maps.policy.argmax(), (10, 7)) == (3, 5)
    assert np.unravel_index(maps.value.argmax(), (10, 7)) == (8, 1)
    usual, screen = (Saliency(agent, {"image": ArraySpec((1, *size), "uint8")}) for size in ((84, 84), (210, 168)))
    assert (usual.radius, usual.blur) == (2.0, 3.0)
    assert (screen.radius, screen.blur) == (4.0, 6.0)
    assert Saliency(agent, spec, Method(radius=2.0)).radius == 2.0


@pytest.mark.parametrize("looks_at", [(3, 5), (5, 3), (8, 1)])
def test_in_a_small_picture_nothing_is_left_out_between_patches(looks_at):
    """With the usual settings: patches of one pixel, one at each pixel, so that the agent's is among them."""
    agent = OnePixel(looks_at, (0, 0))
    lens = Saliency(agent, {"image": ArraySpec((2, 10, 7), "uint8")})
    maps = lens(moment(noise((2, 10, 7))), agent.initial_state(1))
    assert np.unravel_index(maps.policy.argmax(), maps.policy.shape) == looks_at
    assert lens.density == 1
    coarse = Method(usual_density=4.0)
    sizes = {
        side: Saliency(agent, {"image": ArraySpec((1, side, side), "uint8")}, coarse).density for side in (84, 42, 210)
    }
    assert sizes == {84: 4, 42: 2, 210: 10}
    assert Saliency(agent, SPEC).density == 2


def test_the_maximum_on_the_screen():
    """The agent sees all of a screen of 210x160 in 84x84: row 20 of its picture is about row 51 of the screen."""
    agent = OnePixel((20, 60), (60, 12))
    lens = Saliency(agent, SPEC, Method(2))
    maps = lens(moment(noise()), agent.initial_state(1))
    screen = painted(
        np.zeros((210, 160, 3), np.uint8), maps, lens, Look(), {"policy": maps.policy.max(), "value": maps.value.max()}
    )
    for channel, (row, column) in ((0, agent.policy), (1, agent.value)):
        y, x = np.unravel_index(screen[..., channel].argmax(), (210, 160))
        assert abs(y - (row + 0.5) * 210 / 84) <= 2
        assert abs(x - (column + 0.5) * 160 / 84) <= 2
    assert (screen[..., 2] == 0).all()


def test_scores_by_their_definition():
    """One patch, by the loops and filters of the published formula."""
    agent, image = OnePixel(), noise()
    lens = Saliency(agent, SPEC, Method(1, radius=2.0))
    maps = lens(moment(image), (torch.full((1, 1), 0.5),))
    y, x = 21, 59
    cross = np.zeros((84, 84))
    for dy, dx in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)):
        cross[y + dy, x + dx] = 1
    mask = scipy.ndimage.gaussian_filter(cross, 2.0)
    mask /= mask.max()
    blurred = scipy.ndimage.gaussian_filter(image[-1] / 255, 3.0)
    changed = image[-1] / 255 * (1 - mask) + blurred * mask
    expected = 0.5 * (0.5 * (changed[20, 60] - image[-1, 20, 60] / 255)) ** 2  # 0.5: what it remembers
    assert maps.policy[y, x] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("radius", [2.0, 5.0, 30.0])
@pytest.mark.parametrize("point", [(0, 0), (0, 40), (83, 83), (40, 41)])
def test_masks_are_blurred_crosses_up_to_the_border(point, radius):
    cross = np.zeros((84, 84))
    for dy, dx in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)):
        if 0 <= point[0] + dy < 84 and 0 <= point[1] + dx < 84:
            cross[point[0] + dy, point[1] + dx] = 1
    expected = scipy.ndimage.gaussian_filter(cross, radius)
    masks, y, x = Saliency(OnePixel(), SPEC, Method(radius=radius)).masks(torch.tensor([point]))
    mask = np.zeros((84, 84))
    mask[y[0], x[0]] = masks[0]
    np.testing.assert_allclose(mask, expected / expected.max(), atol=1e-5)


def test_memory_is_bounded_and_batches_change_nothing(monkeypatch):
    agent, sizes = OnePixel(), []
    whole = Saliency(agent, SPEC, Method(4))(moment(noise()), agent.initial_state(1))
    monkeypatch.setattr(saliency, "BYTES", 2**20)
    asked = Saliency._ask

    def counted(self, frames, *rest):
        sizes.append(len(frames))
        return asked(self, frames, *rest)

    monkeypatch.setattr(Saliency, "_ask", counted)
    pieces = Saliency(agent, SPEC, Method(4))(moment(noise()), agent.initial_state(1))
    np.testing.assert_allclose(pieces.policy, whole.policy, rtol=1e-5, atol=1e-9)
    assert max(sizes) <= 1 + 2**20 // (4 * 2 * 84 * 84)
    assert len(sizes) > 10


@pytest.mark.parametrize("distance", ["logits", "kl"])
def test_a_blank_picture_and_a_blind_agent_give_zeros(distance):
    agent, method = OnePixel(), Method(6, distance=distance)
    blank = Saliency(agent, SPEC, method)(moment(np.full((2, 84, 84), 90, np.uint8)), agent.initial_state(1))
    blind = Saliency(agent, SPEC, method)(moment(noise()), (torch.zeros(1, 1),))
    picture = noise((210, 160, 3))
    for maps in (blank, blind):
        assert (maps.policy == 0).all()
        assert (maps.value == 0).all()
        for scale in ("absolute", "quantile"):
            look = Look(scale=scale)
            lens = Saliency(agent, SPEC, Method(6))
            assert (painted(picture, maps, lens, look, {"policy": 0.0, "value": 0.0}) == picture).all()


def test_where_logits_did_not_change_policies_did_not_either():
    """What rounding makes of a divergence is no score: a pixel that changes by one, seen by a real network."""
    torch.manual_seed(0)
    agent = BasicAgent(SPEC, ActionSpec(("a", "b", "c")), BasicAgent.Options(init="torch"))
    image = np.full((2, 84, 84), 90, np.uint8)
    image[:, 40, 40] = 91
    by = {d: Saliency(agent, SPEC, Method(6, distance=d))(moment(image), ()).policy for d in ("logits", "kl")}
    assert (by["logits"] == 0).sum() > 100
    assert ((by["kl"] == 0) | (by["logits"] > 0)).all()


def test_searchlight_and_kl_look_at_the_same_place():
    agent = OnePixel()
    light = Saliency(agent, SPEC, Method(2, mode="searchlight"))(moment(noise()), agent.initial_state(1))
    assert light.policy[10, 30] == light.policy.min() < light.policy.max()  # only there nothing is lost
    kl = Saliency(agent, SPEC, Method(2, distance="kl"))(moment(noise()), agent.initial_state(1))
    assert np.unravel_index(kl.policy.argmax(), kl.policy.shape) == (10, 30)


def test_an_agent_that_wants_bytes_gets_bytes():
    agent = OnePixel(bytes_only=True)
    maps = Saliency(agent, SPEC, Method(2))(moment(noise()), agent.initial_state(1))
    assert np.unravel_index(maps.policy.argmax(), maps.policy.shape) == (10, 30)


def test_paint_saturates():
    """Nothing wraps around, and red shows on white, too."""
    heat = np.ones((4, 4))
    both = paint.paint(np.full((4, 4, 3), 250, np.uint8), [(heat, (255, 0, 0)), (heat, (0, 255, 0))])
    assert (both[..., :2] == 255).all()
    assert (both[..., 2] < 150).all()


def test_the_quantile_scale_colours_a_tenth_and_the_absolute_one_what_it_is_worth():
    scores = np.arange(1000.0).reshape(20, 50)
    assert (saliency.quantile_scale(scores) > 0).mean() == pytest.approx(0.1, abs=0.01)
    assert (saliency.quantile_scale(scores / 1e6) > 0).mean() == pytest.approx(0.1, abs=0.01)
    assert saliency.absolute_scale(scores, 500.0).max() == 1
    assert saliency.absolute_scale(scores / 1e6, 500.0).max() < 1e-5
    sparse = np.zeros((20, 20))
    sparse[3, 4] = 1e-3
    assert (saliency.quantile_scale(sparse) > 0).sum() == 1


def test_pong(capsys):
    """The agent that comes with the package: what is drawn has the screen's size, and the numbers are beside it."""
    run = bestiary.load("zoo/pong")
    method, full = Method(density=12), (1.0, 0.5)
    (path,) = look_saliency(
        run, out="pong.mp4", start=30, length=2, method=method, look=Look(full=full), checkpoint=1_000_000
    )
    assert "nearest to step 1000000 is at 1200000" in capsys.readouterr().err
    assert np.stack(list(imageio.imiter(path))).shape == (2, 210, 160, 3)
    with np.load("pong.npz", allow_pickle=False) as found:
        assert found["policy"].shape == found["value"].shape == (2, 7, 7)
        assert found["step"].tolist() == [30, 31]
        assert (found["policy"] >= 0).all()
        assert found["policy"].max() > 0
        protocol = json.loads(str(found["protocol"]))
    assert protocol["full"] == {"policy": 1.0, "value": 0.5}
    assert protocol["density"] == 12
    assert protocol["environment_options"]["noops"] == 30
    again = look_saliency(run, out="again.png", start=30, length=2, method=method, look=Look(full=full))
    assert again == sorted(Path().glob("again*.png")) == [Path("again-00030.png"), Path("again-00031.png")]
    with np.load("again.npz") as one, np.load("pong.npz") as other:
        assert (one["policy"] == other["policy"]).all()


def test_what_cannot_be_looked_at(catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    toy = bestiary.train("toy/chain", run_dir="chain", steps=160, num_envs=4, batch_size=4, runtime="serial")
    with pytest.raises(UserError, match=r"chain: its agent sees vector, not pictures.*bestiary movie"):
        look_saliency(toy)
    monkeypatch.setattr(Saliency, "__call__", None)  # nothing is worked on before all is known to work
    with pytest.raises(UserError, match="chain: its agent sees vector"):
        film_together([catch_runs[0], toy], out="both.gif", saliency=True)
    with pytest.raises(UserError, match="--start 500: the game was over after 9 steps"):
        look_saliency(catch_runs[0], start=500)
    with pytest.raises(UserError, match="--density 9: the agent's pictures are only 10x5"):
        look_saliency(catch_runs[0], method=Method(9))
    with pytest.raises(UserError, match=r"\.avi: can be \.gif or \.mp4 or \.png"):
        look_saliency(catch_runs[0], out="a.avi")


def test_numbered_pictures_replace_nothing_unless_asked(
    catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"look saliency {catch_runs[0].path} --start 2 --length 3 --density 5 --out ow.png".split()
    Path("ow-00004.png").write_text("precious")
    Path("ow-final.png").write_text("no part of a sequence")
    assert run_command(command) == 2
    assert "ow-00004.png exists; choose another name or add --overwrite" in capsys.readouterr().err
    assert Path("ow-00004.png").read_text() == "precious"
    assert run_command([*command, "--overwrite"]) == 0
    assert capsys.readouterr().out == "saliency: ow-00002.png to ow-00004.png\n"
    assert imageio.imread("ow-00004.png").shape == (210, 105, 3)


def test_the_agent_is_asked_again_with_the_memory_that_it_had() -> None:
    """A scene's state is what the steps before it left behind, fed to the agent anew."""
    run = bestiary.train("toy/catch", run_dir="gru", memory="gru", **TINY)
    stage, state = open_stage(run), run.agent().initial_state(1)
    agent, seen = run.agent(), 0
    for (scene,) in Show([stage], length=7):
        given = scene.moment
        assert all(torch.equal(mine, its) for mine, its in zip(given.state, state, strict=True))
        with torch.no_grad():
            _, state = agent(given.inputs, state)
        seen += int(any(part.abs().max() > 0 for part in given.state))
    assert seen == 6  # all but the first moment have something to remember


def test_the_value_is_that_of_the_task_that_is_played() -> None:
    run = bestiary.train("procgen/{maze,leaper}:easy", run_dir="two", popart=True, **{**TINY, "torso": "mlp"})
    look_saliency(run, env="procgen/leaper:easy", length=1, method=Method(16), out="leaper.png")
    stage = open_stage(run, env="procgen/leaper:easy")
    ((scene,),) = Show([stage], length=1)
    lens = Saliency(run.agent(), stage.pool.observation_spec, Method(16))
    worths, maps = [], []
    for task in (0, 1):
        scene.moment.inputs.task = torch.full((1, 1), task)
        maps.append(lens(scene.moment.inputs, scene.moment.state).value)
        worths.append(run.agent()(scene.moment.inputs, scene.moment.state)[0].value.item())
    with np.load("leaper.npz") as found:
        np.testing.assert_allclose(found["value"][0], maps[1], rtol=1e-4)
        assert not np.allclose(found["value"][0], maps[0], rtol=1e-2)
        assert found["worth"][0] == pytest.approx(worths[1], rel=1e-4)


def test_where_the_screen_is_not_what_the_agent_sees_the_agents_picture_is_painted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The agent sees the lower right quarter of a world; its picture is painted, not the world."""
    Path("part.py").write_text(PART_OF_A_WORLD)
    run = bestiary.train("part.py:Part", run_dir="part", **{**TINY, "torso": "mlp"})
    capsys.readouterr()
    look_saliency(run, length=1, out="part.png", look=Look(full=(1e9, 1e9)))
    picture = imageio.imread("part.png")
    assert (picture[:104, :104] > 200).all()  # white above and left, as the agent sees it
    assert (picture[110:, 110:] < 50).all()
    assert "may show something else than the agent sees" in capsys.readouterr().err
    assert run_command("movie part --saliency --length 2 --out both.gif".split()) == 0


def test_looks_never_share_a_name_with_others(catch_runs: list[Run], tmp_path: Path) -> None:
    """A still and a movie of the same moment have numbers of their own beside them."""
    run = bestiary.train("toy/catch", run_dir="own", **TINY)
    draw_missing(run)
    (movie,) = look_saliency(run, length=2)
    looks = {path.name for path in movie.parent.iterdir()}
    assert {path.split(".")[0] for path in looks} == {"saliency-000000000080-0", "saliency-000000000080-0-2"}
    assert len(looks) == 4
    again = bestiary.train("toy/catch", run_dir="again", **TINY)
    look_saliency(again, length=2)
    draw_missing(again)
    assert len(list((again.path / "looks").glob("*.png"))) == 1


def test_a_small_world_with_a_memory(catch_runs: list[Run]) -> None:
    run = bestiary.train(
        "toy/catch", run_dir="lstm", steps=160, num_envs=4, batch_size=4, runtime="serial", memory="lstm"
    )
    (path,) = look_saliency(run, length=3, method=Method(1), out="catch.gif")
    with np.load("catch.npz") as found:
        assert json.loads(str(found["protocol"]))["radius"] == 0.5
    assert imageio.imread(path, index=None).shape[1:] == (210, 105, 3)
