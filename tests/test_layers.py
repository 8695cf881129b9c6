"""What users write is laid over files, files over presets; and presets are what was published."""

import pytest

from bestiary.errors import UserError
from bestiary.resolve import layers, resolve
from bestiary.textconfig import flatten, presets, read_toml


def write(path, text):
    path.write_text(text)
    return str(path)


def test_preset_below_config_below_direct(tmp_path):
    preset = read_toml(presets()["hello"])
    assert preset["algo.lr"] == 0.002
    file = write(tmp_path / "a.toml", "steps = 500\nseed = 5\n")

    def resolved(**options):
        return resolve(layers(options)[0])

    alone = resolved(preset="hello")
    assert (alone.training.steps, alone.training.seed, alone.parts["algo"].options.lr) == (120_000, 1, 0.002)
    both = resolved(preset="hello", config=file)
    assert (both.training.steps, both.training.seed, both.parts["algo"].options.lr) == (500, 5, 0.002)
    all_three = resolved(preset="hello", config=file, steps="1k")
    assert (all_three.training.steps, all_three.training.seed) == (1_000, 5)


@pytest.mark.parametrize("spelling", ["lr", "algo.lr"])
@pytest.mark.parametrize("in_file", ["lr = 0.1", "[algo]\nlr = 0.1"])
def test_direct_wins_however_the_layers_spell_it(tmp_path, in_file, spelling):
    file = write(tmp_path / "a.toml", in_file + "\n")
    given, _ = layers({"preset": "hello", "config": file, spelling: 0.5})
    assert resolve(given).parts["algo"].options.lr == 0.5


@pytest.mark.parametrize("in_file", ["lr = 0.1", "[algo]\nlr = 0.1"])
def test_config_wins_over_preset_however_they_spell_it(tmp_path, in_file):
    file = write(tmp_path / "a.toml", in_file + "\n")
    given, _ = layers({"preset": "hello", "config": file})
    assert resolve(given).parts["algo"].options.lr == 0.1


def test_origin_of_each_key(tmp_path):
    file = write(tmp_path / "a.toml", "nonsense = 5\nseed = 3\n")
    given, origin = layers({"env": "toy/catch", "config": file, "seed": 4})
    assert origin == {"nonsense": f"config {file}"}
    with pytest.raises(UserError) as error:
        resolve(given, origin)
    (problem,) = error.value.problems
    assert problem.startswith(f"unknown option --nonsense (in config {file})")


def test_hyphens_and_underscores_are_the_same(tmp_path):
    file = write(tmp_path / "a.toml", "num-envs = 4\n[algo]\nbatch-size = 4\nunroll_length = 7\n")
    config = resolve(layers({"env": "toy/catch", "config": file})[0])
    assert config.training.num_envs == config.parts["algo"].options.batch_size == 4
    assert config.parts["algo"].options.unroll_length == 7
    direct = resolve(layers({"env": "toy/catch", "num-envs": 4, "batch-size": 4, "unroll_length": 7})[0])
    assert direct == config


def test_nested_options_from_python():
    given, _ = layers({"env": "toy/catch", "memory": {"name": "lstm", "hidden": 16}})
    assert resolve(given).parts["memory"].options.hidden == 16


def test_unknown_preset():
    with pytest.raises(UserError, match=r"--preset helo: there is .*did you mean hello\?"):
        layers({"preset": "helo"})


def test_missing_config_file(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        layers({"config": str(tmp_path / "none.toml")})


def test_config_that_is_no_toml(tmp_path):
    with pytest.raises(UserError, match=r"a\.toml: not readable as TOML: .*line 2"):
        layers({"config": write(tmp_path / "a.toml", "seed = 1\nseed 2\n")})


# --- presets ---


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid(name):
    given, origin = layers({"preset": name})
    resolve({"env": "toy/catch", **given}, origin)


IMPALA = {
    "algo.discount": 0.99,
    "algo.optimizer": "rmsprop",
    "algo.eps": 0.01,
    "algo.max_grad_norm": 40.0,
    "algo.lam": 1.0,
}
SIX = {
    **IMPALA,
    "algo.unroll_length": 80,
    "algo.batch_size": 8,
    "algo.lr": 4.8e-4,
    "algo.entropy": 6e-4,
    "num_envs": 48,
}
PROCGEN = {
    **IMPALA, "algo.unroll_length": 50, "algo.batch_size": 32, "algo.lr": 6e-4, "algo.entropy": 0.01, "steps": 300_000_000,
    "keep": [150_000_000], "algo.reward": "abs_one", "torso": "resnet",
}  # fmt: skip
SRWM = {"memory": "srwm", "memory.layers": 2, "memory.hidden": 128, "memory.heads": 8, "valid_episodes": 10}
EASY = [f"procgen/{game}:easy" for game in "bigfish fruitbot maze leaper plunder starpilot".split()]
MEMORY = [f"procgen/{game}:memory" for game in "dodgeball heist maze miner".split()]
WAREHOUSE = {
    "algo": "ppo", "algo.epochs": 3, "algo.lr": 2.5e-4, "algo.clip": 0.1, "algo.value_clip": True, "algo.entropy": 0.01,
    "algo.discount": 0.99, "algo.lam": 0.95, "algo.sequence": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("popart-six", {**SIX, "critic": "popart", "critic.beta": 3e-4, "algo.reward": "none", "steps": 300_000_000}),
        ("multitask-six", {**SIX, "critic": "shared", "algo.reward": "abs_one", "steps": 300_000_000}),
        ("single-task", {**SIX, "critic": "shared", "steps": 50_000_000}),
        ("ff-procgen-easy6", {**PROCGEN, "memory": "none", "env.levels": "0:200", "valid_levels": "500:700"}),
        ("lstm-procgen-easy6", {**PROCGEN, "memory": "lstm", "memory.hidden": 256, "env.levels": "0:200"}),
        ("lstm-procgen-memory4", {**PROCGEN, "memory": "lstm", "env.levels": "0:500", "num_envs": 48}),
        ("srwm-procgen-easy6", {**PROCGEN, **SRWM, "env": EASY, "env.levels": "0:200", "valid_levels": "500:700"}),
        ("srwm-procgen-memory4", {**PROCGEN, **SRWM, "env": MEMORY, "env.levels": "0:500", "num_envs": 48}),
        (
            "iam-warehouse",
            {**WAREHOUSE, "num_envs": 8, "algo.rollout_length": 128, "algo.horizon": 8, "algo.normalize": False,
             "algo.clip_schedule": "linear", "steps": 32_000_000, "env.legacy": True, "memory": "lstm"},
        ),
        (
            "iam-keijzer",
            {**WAREHOUSE, "num_envs": 32, "algo.rollout_length": 8, "algo.minibatches": 32, "algo.schedule": "constant",
             "algo.normalize": True, "steps": 4_000_000, "env.legacy": True, "agent.dset": "legacy", "memory": "gru"},
        ),
    ],
)  # fmt: skip
def test_published_settings(name, published):
    """As the papers and their code have them; what differs on purpose, the preset's first lines say."""
    given, origin = layers({"preset": name})
    settings = flatten(resolve(given, origin).tables())
    assert {key: settings[key] for key in published} == published


@pytest.mark.parametrize(
    ("options", "critic", "reward"),
    [
        ({"preset": "multitask-six", "popart": True}, "popart", "none"),
        ({"preset": "popart-six", "popart": "off"}, "shared", "abs_one"),
        ({"preset": "popart-six", "critic": "per-task"}, "per-task", "abs_one"),
        ({"preset": "popart-six"}, "popart", "none"),
        ({"preset": "popart-six", "algo.reward": "abs_one"}, "popart", "abs_one"),
        ({"preset": "multitask-six", "popart": "off"}, "shared", "abs_one"),
    ],
)
def test_popart_goes_over_a_presets_critic_and_the_clip_goes_with_it(options, critic, reward):
    settings = flatten(resolve(*layers(options)).tables())
    assert (settings["critic"], settings["algo.reward"]) == (critic, reward)
