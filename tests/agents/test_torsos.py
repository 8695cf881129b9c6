"""Tests of torsos: published sizes, observations, calibration, and refused observations."""

import itertools

import pytest
import torch
import torch.nn as nn

from bestiary.agents.agent import BasicAgent, count_parameters
from bestiary.agents.torsos import MLP, TORSOS, Impoola, ResidualBlock, ResNet, Shallow, default_torso
from bestiary.config.resolve import resolve
from bestiary.rollout import ActionSpec, ArraySpec
from bestiary.training.factory import make_actors_and_learner
from bestiary.utils.errors import UserError

ATARI = {"image": ArraySpec((4, 84, 84), "uint8")}
SIX = ActionSpec(tuple("abcdef"))


def image(channels, height, width):
    return {"image": ArraySpec((channels, height, width), "uint8")}


def vector(size):
    return {"vector": ArraySpec((size,), "float32")}


def random_observation(spec, batch, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        kind: torch.randint(256, (batch, *s.shape), dtype=torch.uint8, generator=g)
        if s.dtype == "uint8"
        else torch.randn(batch, *s.shape, generator=g)
        for kind, s in spec.items()
    }


# --- published networks ---


@pytest.mark.parametrize(("torso", "parameters"), [("shallow", 1_687_768), ("resnet", 1_091_038)])
def test_parameter_counts_of_the_published_networks(torso, parameters):
    """Torso and heads for six actions, without memory. The published agent with the ResNet has no last-action input."""
    assert count_parameters(BasicAgent(ATARI, SIX, torso=TORSOS[torso])) == parameters


def test_layers_of_the_resnet():
    torso = ResNet(ATARI)
    assert count_parameters(torso.convolutions) == 97_744
    assert count_parameters(torso.layers) == 991_488
    assert sum(isinstance(m, nn.Conv2d) for m in torso.modules()) == 15
    assert torso.output_size == 256
    assert torso.layers[0].in_features == 32 * 11 * 11


def test_layers_of_the_shallow_torso():
    torso = Shallow(ATARI)
    assert torso.layers[0].in_features == 64 * 7 * 7
    assert torso.output_size == 512


def test_residual_block():
    """The block computes x + conv(relu(conv(relu(x)))), which is x if the second convolution is zero."""
    block = ResidualBlock(3)
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    expected = x + block.second(torch.relu(block.first(torch.relu(x))))
    torch.testing.assert_close(block(x), expected)
    for parameter in block.second.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("sections", [(8,), (8, 16), (4, 4, 4, 4)])
def test_resnet_sections(sections):
    torso = ResNet(ATARI, ResNet.Options(channels=sections))
    assert sum(isinstance(m, nn.Conv2d) for m in torso.modules()) == 5 * len(sections)
    side = 84
    for _ in sections:
        side = (side + 1) // 2  # pooling 3x3, stride 2, padding 1
    assert torso.layers[0].in_features == sections[-1] * side * side


# --- every torso ---


SPECS = {
    "atari": ATARI,
    "colour": image(12, 84, 84),
    "small": image(1, 36, 36),
    "wide": image(3, 40, 97),
    "tall": image(3, 210, 160),
    "image+vector": {**image(2, 48, 48), **vector(7)},
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("name", TORSOS)
def test_any_image_size(name, spec):
    torso = TORSOS[name](spec)
    output = torso(random_observation(spec, 3))
    assert output.shape == (3, torso.output_size)
    assert output.dtype == torch.float32


@pytest.mark.parametrize("name", TORSOS)
def test_rows_are_independent(name):
    spec = SPECS["image+vector"]
    torso = TORSOS[name](spec)
    observation = random_observation(spec, 4)
    batch = torso(observation)
    for row in range(4):
        alone = torso({kind: x[row : row + 1] for kind, x in observation.items()})
        torch.testing.assert_close(alone[0], batch[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["image", "vector"])
@pytest.mark.parametrize("name", TORSOS)
def test_output_depends_on_every_observation(name, kind):
    spec = SPECS["image+vector"]
    torso = TORSOS[name](spec)
    observation, other = random_observation(spec, 3), random_observation(spec, 3, seed=1)
    changed = torso({**observation, kind: other[kind]})
    assert not torch.isclose(torso(observation), changed).all(dim=1).any()


@pytest.mark.parametrize("kind", [Shallow, ResNet])
def test_images_are_scaled_to_one(kind):
    torso = kind(SPECS["small"])
    images = random_observation(SPECS["small"], 2)["image"]
    expected = torso.layers(torso.convolutions(images.float() / 255).flatten(1))
    torch.testing.assert_close(torso({"image": images}), expected, rtol=1e-4, atol=1e-5)


def test_mlp_without_layers_returns_its_inputs():
    """The inputs are concatenated in the order of their names, uint8 scaled to [0,1]."""
    spec = {**vector(7), **image(2, 5, 4)}
    observation = random_observation(spec, 3)
    expected = torch.cat([observation["image"].flatten(1).float() / 255, observation["vector"]], dim=1)
    torch.testing.assert_close(MLP(spec, MLP.Options(depth=0))(observation), expected)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", [Shallow, ResNet, Impoola, MLP])
def test_width_and_depth(kind, depth):
    torso = kind(ATARI, kind.Options(width=24, depth=depth))
    layers = [m for m in torso.layers if isinstance(m, nn.Linear)]
    assert len(layers) == depth
    assert all(layer.out_features == 24 for layer in layers)
    assert torso(random_observation(ATARI, 2)).shape == (2, torso.output_size)
    if depth:
        assert torso.output_size == 24


def test_layers_do_not_share_weights():
    torso = MLP(vector(16), MLP.Options(width=16, depth=3))
    weights = [m.weight for m in torso.layers if isinstance(m, nn.Linear)]
    assert len({w.data_ptr() for w in weights}) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights))
    assert count_parameters(torso) == 3 * (16 * 16 + 16)


# --- refused observations, default ---


@pytest.mark.parametrize("name", ["shallow", "resnet", "impoola"])
def test_missing_image_is_refused(name):
    with pytest.raises(UserError, match=r"needs an image.*vector.*--torso mlp"):
        TORSOS[name](vector(4))


@pytest.mark.parametrize("size", [(35, 84), (84, 35), (10, 5)])
def test_too_small_image_is_refused(size):
    with pytest.raises(UserError, match=f"36x36, not {size[0]}x{size[1]}"):
        Shallow(image(4, *size))


def test_resnet_accepts_images_of_one_pixel():
    spec = image(1, 1, 1)
    assert ResNet(spec)(random_observation(spec, 2)).shape == (2, 256)


def test_default_torso():
    assert default_torso(ATARI) == "shallow"
    assert default_torso(image(1, 36, 36)) == "shallow"
    assert default_torso(image(1, 35, 80)) == "mlp"
    assert default_torso(vector(4)) == "mlp"
    assert default_torso(SPECS["image+vector"]) == "shallow"


# --- calibration ---


@torch.no_grad()
def test_mean_image_is_subtracted():
    spec = {"image": ArraySpec((4, 84, 84), "uint8")}
    images = torch.randint(256, (6, 4, 84, 84), dtype=torch.uint8)
    torso = Shallow(spec)
    before = torso({"image": images})
    torso.calibrate({"image": images})
    assert torso.mean is not None
    assert torch.allclose(torso.mean[0], images.float().mean(0), atol=1e-3)
    centred = (images.float() - images.float().mean(0)) / 255
    torch.testing.assert_close(torso.encode({"image": images}), torso.convolutions(centred), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(torso({"image": images}), before)
    published = Shallow(spec, Shallow.Options(subtract_mean=False))
    assert published.mean is None
    assert torso.needs_calibration
    assert not published.needs_calibration
    torch.testing.assert_close(published.encode({"image": images}), published.convolutions(images.float() / 255))


def test_agents_start_with_the_mean_image_of_random_play():
    config = resolve({"env": "atari/Pong", "runtime": "local", "num_envs": 4, "batch_size": 2, "steps": 100})
    actors, learner = make_actors_and_learner(config)
    again, _ = make_actors_and_learner(config)
    for actor in (*actors, *again):
        actor.pool.close()
    mean = learner.agent.state_dict()["torso.mean"]
    assert 90 < mean.mean() < 120  # mostly Pong's background
    assert all(torch.equal(actor.agent.state_dict()["torso.mean"], mean) for actor in (*actors, *again))


@torch.no_grad()
def test_normalised_inputs():
    spec = {"vector": ArraySpec((3,), "float32")}
    torso = MLP(spec, MLP.Options(normalise_inputs=True))
    x = torch.tensor([[1.0, 5.0, 2.0], [3.0, 5.0, -2.0], [5.0, 5.0, 0.0], [7.0, 5.0, 0.0]])
    torso.calibrate({"vector": x})
    encoded = torso.encode({"vector": x})
    assert torch.allclose(encoded.mean(0), torch.zeros(3), atol=1e-6)
    deviations = torch.tensor([1.0, 0.0, 1.0])  # the second input is constant
    assert torch.allclose(encoded.std(0, correction=0), deviations, atol=1e-6)
    assert torso.encode({"vector": torch.full((1, 3), 1e6)}).max() == 10
    assert set(torso.state_dict()) >= {"mean", "deviation"}  # saved with the weights
    assert not MLP(spec).needs_calibration
    assert torch.equal(MLP(spec).encode({"vector": x}), x)
