"""Torsos: sizes as published, any input, independent layers, and refusals that say what to do."""

import itertools

import pytest
import torch
import torch.nn as nn

from bestiary.agents.agent import BasicAgent, count_parameters
from bestiary.agents.torsos import MLP, TORSOS, Residual, ResNet, Shallow, suitable
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.rollout import ActionSpec, ArraySpec
from bestiary.runtime.build import build

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


# --- as published ---


@pytest.mark.parametrize(("torso", "parameters"), [("shallow", 1_687_768), ("resnet", 1_091_038)])
def test_parameter_counts_of_the_published_nets(torso, parameters):
    """Torso and heads at six actions, without memory; the resnet's policy does not see the last action."""
    assert count_parameters(BasicAgent(ATARI, SIX, torso=TORSOS[torso])) == parameters


def test_parts_of_the_resnet():
    torso = ResNet(ATARI)
    assert count_parameters(torso.convolutions) == 97_744
    assert count_parameters(torso.layers) == 991_488
    assert sum(isinstance(m, nn.Conv2d) for m in torso.modules()) == 15
    assert torso.output_size == 256
    assert torso.layers[0].in_features == 32 * 11 * 11


def test_parts_of_the_shallow_net():
    torso = Shallow(ATARI)
    assert torso.layers[0].in_features == 64 * 7 * 7
    assert torso.output_size == 512


def test_residual_block():
    """x + conv(relu(conv(relu(x)))): with the second convolution at zero, exactly x."""
    block = Residual(3)
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    by_hand = x + block.second(torch.relu(block.first(torch.relu(x))))
    torch.testing.assert_close(block(x), by_hand)
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
def test_any_size_of_image(name, spec):
    torso = TORSOS[name](spec)
    output = torso(random_observation(spec, 3))
    assert output.shape == (3, torso.output_size)
    assert output.dtype == torch.float32


@pytest.mark.parametrize("name", TORSOS)
def test_rows_are_independent(name):
    spec = SPECS["image+vector"]
    torso = TORSOS[name](spec)
    observation = random_observation(spec, 4)
    together = torso(observation)
    for row in range(4):
        alone = torso({kind: x[row : row + 1] for kind, x in observation.items()})
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["image", "vector"])
@pytest.mark.parametrize("name", TORSOS)
def test_every_kind_of_observation_counts(name, kind):
    spec = SPECS["image+vector"]
    torso = TORSOS[name](spec)
    observation, other = random_observation(spec, 3), random_observation(spec, 3, seed=1)
    changed = torso({**observation, kind: other[kind]})
    assert not torch.isclose(torso(observation), changed).all(dim=1).any()


@pytest.mark.parametrize("torso", [Shallow, ResNet])
def test_bytes_are_scaled(torso):
    """What the convolutions see lies in [0,1], in whichever layout."""
    made = torso(SPECS["small"])
    picture = random_observation(SPECS["small"], 2)["image"]
    by_hand = made.layers(made.convolutions(picture.float() / 255).flatten(1))
    torch.testing.assert_close(made({"image": picture}), by_hand, rtol=1e-4, atol=1e-5)


def test_mlp_of_no_depth_is_what_it_sees():
    """All kinds side by side in the order of their names, bytes scaled to [0,1]."""
    spec = {**vector(7), **image(2, 5, 4)}
    observation = random_observation(spec, 3)
    expected = torch.cat([observation["image"].flatten(1).float() / 255, observation["vector"]], dim=1)
    torch.testing.assert_close(MLP(spec, MLP.Options(depth=0))(observation), expected)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", [Shallow, ResNet, MLP])
def test_width_and_depth(kind, depth):
    torso = kind(ATARI, kind.Options(width=24, depth=depth))
    layers = [m for m in torso.layers if isinstance(m, nn.Linear)]
    assert len(layers) == depth
    assert all(layer.out_features == 24 for layer in layers)
    assert torso(random_observation(ATARI, 2)).shape == (2, torso.output_size)
    if depth:
        assert torso.output_size == 24


def test_layers_have_weights_of_their_own():
    """A layer repeated would count once and learn as one."""
    torso = MLP(vector(16), MLP.Options(width=16, depth=3))
    weights = [m.weight for m in torso.layers if isinstance(m, nn.Linear)]
    assert len({w.data_ptr() for w in weights}) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights))
    assert count_parameters(torso) == 3 * (16 * 16 + 16)


# --- refusals ---


@pytest.mark.parametrize("name", ["shallow", "resnet"])
def test_missing_image_is_refused(name):
    with pytest.raises(UserError, match=r"needs an image.*gives vector.*--torso mlp"):
        TORSOS[name](vector(4))


@pytest.mark.parametrize("size", [(35, 84), (84, 35), (10, 5)])
def test_too_small_image_is_refused(size):
    with pytest.raises(UserError, match=f"36x36, not {size[0]}x{size[1]}"):
        Shallow(image(4, *size))


def test_resnet_takes_the_smallest_image():
    spec = image(1, 1, 1)
    assert ResNet(spec)(random_observation(spec, 2)).shape == (2, 256)


def test_suitable():
    assert suitable(ATARI) == "shallow"
    assert suitable(image(1, 36, 36)) == "shallow"
    assert suitable(image(1, 35, 80)) == "mlp"
    assert suitable(vector(4)) == "mlp"
    assert suitable(SPECS["image+vector"]) == "shallow"


@torch.no_grad()
def test_the_mean_picture_is_what_is_always_there():
    """A centred torso sees a picture less the mean; the published one sees it as it is."""
    spec = {"image": ArraySpec((4, 84, 84), "uint8")}
    pictures = torch.randint(256, (6, 4, 84, 84), dtype=torch.uint8)
    torso = Shallow(spec)
    before = torso({"image": pictures})
    torso.acquaint({"image": pictures})
    assert torso.mean is not None
    assert torch.allclose(torso.mean[0], pictures.float().mean(0), atol=1e-3)
    centred = (pictures.float() - pictures.float().mean(0)) / 255
    torch.testing.assert_close(torso.look({"image": pictures}), torso.convolutions(centred), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(torso({"image": pictures}), before)
    plain = Shallow(spec, Shallow.Options(center=False))
    assert plain.mean is None
    assert torso.curious
    assert not plain.curious
    torch.testing.assert_close(plain.look({"image": pictures}), plain.convolutions(pictures.float() / 255))


def test_a_run_begins_with_the_mean_of_random_play_and_keeps_it():
    config = resolve({"env": "atari/Pong", "runtime": "local", "num_envs": 4, "batch_size": 2, "steps": 100})
    actors, learner = build(config)
    again, _ = build(config)
    for actor in (*actors, *again):
        actor.pool.close()
    mean = learner.agent.state_dict()["torso.mean"]
    assert 90 < mean.mean() < 120  # Pong's brown, and a little of paddles and ball
    assert all(torch.equal(actor.agent.state_dict()["torso.mean"], mean) for actor in (*actors, *again))


@torch.no_grad()
def test_normalised_inputs():
    spec = {"vector": ArraySpec((3,), "float32")}
    torso = MLP(spec, MLP.Options(normalize=True))
    x = torch.tensor([[1.0, 5.0, 2.0], [3.0, 5.0, -2.0], [5.0, 5.0, 0.0], [7.0, 5.0, 0.0]])
    torso.acquaint({"vector": x})
    seen = torso.look({"vector": x})
    assert torch.allclose(seen.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(
        seen.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]), atol=1e-6
    )  # the second never changed
    assert torso.look({"vector": torch.full((1, 3), 1e6)}).max() == 10
    assert set(torso.state_dict()) >= {"mean", "deviation"}  # saved with the weights
    assert not MLP(spec).curious
    assert torch.equal(MLP(spec).look({"vector": x}), x)
