"""Merging of presets, config files and direct options; values of the published presets."""

import pytest

from bestiary.config.resolve import resolve
from bestiary.config.toml import flatten, preset_paths, read_toml
from bestiary.runs.option_sources import merge_sources
from bestiary.utils.errors import UserError


def write(path, text):
    path.write_text(text)
    return str(path)


def test_direct_options_override_config_file_and_preset(tmp_path):
    preset = read_toml(preset_paths()["hello"])
    assert preset["algo.lr"] == 0.002
    file = write(tmp_path / "a.toml", "steps = 500\nseed = 5\n")

    def resolved(**options):
        return resolve(merge_sources(options)[0])

    alone = resolved(preset="hello")
    assert (alone.training.steps, alone.training.seed, alone.components["algo"].options.lr) == (120_000, 1, 0.002)
    both = resolved(preset="hello", config=file)
    assert (both.training.steps, both.training.seed, both.components["algo"].options.lr) == (500, 5, 0.002)
    all_three = resolved(preset="hello", config=file, steps="1k")
    assert (all_three.training.steps, all_three.training.seed) == (1_000, 5)


@pytest.mark.parametrize("spelling", ["lr", "algo.lr"])
@pytest.mark.parametrize("in_file", ["lr = 0.1", "[algo]\nlr = 0.1"])
def test_direct_option_overrides_all_spellings(tmp_path, in_file, spelling):
    file = write(tmp_path / "a.toml", in_file + "\n")
    given, _ = merge_sources({"preset": "hello", "config": file, spelling: 0.5})
    assert resolve(given).components["algo"].options.lr == 0.5


@pytest.mark.parametrize("in_file", ["lr = 0.1", "[algo]\nlr = 0.1"])
def test_config_file_overrides_all_spellings_of_preset(tmp_path, in_file):
    file = write(tmp_path / "a.toml", in_file + "\n")
    given, _ = merge_sources({"preset": "hello", "config": file})
    assert resolve(given).components["algo"].options.lr == 0.1


def test_origin_names_the_source_of_keys_not_given_directly(tmp_path):
    file = write(tmp_path / "a.toml", "nonsense = 5\nseed = 3\n")
    given, origin = merge_sources({"env": "toy/catch", "config": file, "seed": 4})
    assert origin == {"nonsense": f"config {file}"}
    with pytest.raises(UserError) as error:
        resolve(given, origin)
    (problem,) = error.value.problems
    assert problem.startswith(f"unknown option --nonsense (in config {file})")


def test_hyphens_and_underscores_are_the_same(tmp_path):
    file = write(tmp_path / "a.toml", "num-envs = 4\n[algo]\nbatch-size = 4\nrollout_length = 7\n")
    config = resolve(merge_sources({"env": "toy/catch", "config": file})[0])
    assert config.training.num_envs == config.components["algo"].options.batch_size == 4
    assert config.components["algo"].options.rollout_length == 7
    direct = resolve(merge_sources({"env": "toy/catch", "num-envs": 4, "batch-size": 4, "rollout_length": 7})[0])
    assert direct == config


def test_nested_options_from_python():
    given, _ = merge_sources({"env": "toy/catch", "memory": {"name": "lstm", "hidden": 16}})
    assert resolve(given).components["memory"].options.hidden == 16


def test_unknown_preset():
    with pytest.raises(UserError, match=r"--preset helo: unknown.*did you mean hello\?"):
        merge_sources({"preset": "helo"})


def test_missing_config_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml: no such file"):
        merge_sources({"config": str(tmp_path / "none.toml")})


def test_invalid_config_file(tmp_path):
    with pytest.raises(UserError, match=r"a\.toml: not a valid TOML file: .*line 2"):
        merge_sources({"config": write(tmp_path / "a.toml", "seed = 1\nseed 2\n")})


# --- presets ---


@pytest.mark.parametrize("name", preset_paths())
def test_every_preset_is_valid(name):
    given, origin = merge_sources({"preset": name})
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
    "algo.rollout_length": 80,
    "algo.batch_size": 8,
    "algo.lr": 4.8e-4,
    "algo.entropy_coef": 6e-4,
    "num_envs": 48,
}
PROCGEN = {
    **IMPALA, "algo.rollout_length": 50, "algo.batch_size": 32, "algo.lr": 6e-4, "algo.entropy_coef": 0.01,
    "steps": 300_000_000, "keep_at": [150_000_000], "algo.reward_clipping": "abs_one", "torso": "resnet",
}  # fmt: skip
SRWM = {"memory": "srwm", "memory.layers": 2, "memory.hidden": 128, "memory.heads": 8, "valid_episodes": 10}
EASY = [f"procgen/{game}:easy" for game in "bigfish fruitbot maze leaper plunder starpilot".split()]
MEMORY = [f"procgen/{game}:memory" for game in "dodgeball heist maze miner".split()]
WAREHOUSE = {
    "algo": "ppo", "algo.epochs": 3, "algo.lr": 2.5e-4, "algo.clip": 0.1, "algo.value_clip": True,
    "algo.entropy_coef": 0.01, "algo.discount": 0.99, "algo.lam": 0.95, "algo.sequence_length": 8,
}  # fmt: skip
BISLIP = {
    **{name: value for name, value in WAREHOUSE.items() if name != "algo.sequence_length"},
    "algo.lam": 1.0, "algo.lr_schedule": "constant", "algo.reward_clipping": "return_std", "env.legacy": True,
    "steps": 4_000_000, "num_envs": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published"),
    [
        (
            "popart-six",
            {**SIX, "critic": "popart", "critic.beta": 3e-4, "algo.reward_clipping": "none", "steps": 300_000_000},
        ),
        ("multitask-six", {**SIX, "critic": "shared", "algo.reward_clipping": "abs_one", "steps": 300_000_000}),
        ("single-task", {**SIX, "critic": "shared", "steps": 50_000_000}),
        ("impala-shallow", {**IMPALA, "algo.optimizer": "rmsprop_tf", "torso": "shallow", "steps": 50_000_000}),
        ("impala-deep", {**IMPALA, "algo.optimizer": "rmsprop_tf", "torso": "resnet", "steps": 50_000_000}),
        (
            "clear-atari",
            {**IMPALA, "algo": "clear", "algo.optimizer": "rmsprop_tf", "algo.rollout_length": 20, "algo.lr": 6e-4,
             "algo.entropy_coef": 0.01, "algo.batch_size": 16, "algo.replay_ratio": 1.0,
             "algo.policy_cloning_coef": 0.01, "algo.value_cloning_coef": 0.005, "algo.reward_clipping": "abs_one",
             "env.full_actions": True, "steps": 12_500_000},
        ),
        ("torchbeast", {**IMPALA, "algo.rollout_length": 80, "algo.batch_size": 4, "steps": 30_000_000}),
        ("ff-procgen-easy6", {**PROCGEN, "memory": "none", "env.levels": "0:200", "valid_levels": "500:700"}),
        ("lstm-procgen-easy6", {**PROCGEN, "memory": "lstm", "memory.hidden": 256, "env.levels": "0:200"}),
        ("lstm-procgen-memory4", {**PROCGEN, "memory": "lstm", "env.levels": "0:500", "num_envs": 48}),
        ("srwm-procgen-easy6", {**PROCGEN, **SRWM, "env": EASY, "env.levels": "0:200", "valid_levels": "500:700"}),
        (
            "srwm-no-carry-procgen-easy6",
            {**PROCGEN, **SRWM, "memory": "srwm-no-carry", "memory.reset_interval": 50, "env": EASY},
        ),
        (
            "srwm-no-carry-procgen-memory4",
            {**PROCGEN, **SRWM, "memory": "srwm-no-carry", "memory.reset_interval": 50, "env": MEMORY},
        ),
        ("srwm-procgen-memory4", {**PROCGEN, **SRWM, "env": MEMORY, "env.levels": "0:500", "num_envs": 48}),
        (
            "iam-warehouse",
            {**WAREHOUSE, "num_envs": 8, "algo.rollout_length": 128, "algo.horizon": 8,
             "algo.normalise_advantages": False, "algo.clip_schedule": "linear", "steps": 32_000_000,
             "env.legacy": True, "memory": "lstm"},
        ),
        (
            "iam-keijzer",
            {**WAREHOUSE, "num_envs": 32, "algo.rollout_length": 8, "algo.minibatches": 32,
             "algo.lr_schedule": "constant", "algo.normalise_advantages": True, "steps": 4_000_000, "env.legacy": True,
             "agent.dset": "legacy", "memory": "gru", "algo.reward_clipping": "return_std"},
        ),
        ("fnn1-bislip", {**BISLIP, "memory": "none", "algo.rollout_length": 1}),
        ("fnn8-bislip", {**BISLIP, "memory": "none", "algo.rollout_length": 8}),
        ("gru-bislip", {**BISLIP, "memory": "gru", "torso.depth": 0, "algo.sequence_length": 8}),
        ("iam-bislip", {**BISLIP, "memory": "gru", "agent.policy_layers": [64], "algo.sequence_length": 8}),
    ],
)  # fmt: skip
def test_published_settings(name, published):
    """Presets have the values of the papers and their code, except for the differences that their comments name."""
    given, origin = merge_sources({"preset": name})
    settings = flatten(resolve(given, origin).tables())
    assert {key: settings[key] for key in published} == published


def test_the_next_game_of_a_sequence_continues_with_the_preset_for_clear():
    """The second run of a sequence takes its game from the command line and everything else from the preset."""
    given, origin = merge_sources({"preset": "clear-atari", "env": "atari/Krull"})
    settings = flatten(resolve(given, origin).tables())
    first = flatten(resolve(*merge_sources({"preset": "clear-atari"})).tables())
    assert settings == {**first, "env": ["atari/Krull"]}


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("iam-warehouse", ("end an episode", "forget gate", "Biases", "Time limit", "Minibatches", "Initial weights")),
        ("multitask-six", ("200M",)),
        ("clear-atari", ("10,000 trajectories", "cloned policy", "learning rate")),
    ],
)
def test_comments_name_the_known_differences_from_the_source(name, differences):
    comments = [line for line in preset_paths()[name].read_text().splitlines() if line.startswith("#")]
    for difference in differences:
        assert any(difference in line for line in comments), difference


@pytest.mark.parametrize(
    ("options", "critic", "reward"),
    [
        ({"preset": "multitask-six", "critic": "popart"}, "popart", "none"),
        ({"preset": "popart-six", "critic": "shared"}, "shared", "abs_one"),
        ({"preset": "popart-six", "critic": "per-task"}, "per-task", "abs_one"),
        ({"preset": "popart-six"}, "popart", "none"),
        ({"preset": "popart-six", "algo.reward_clipping": "abs_one"}, "popart", "abs_one"),
        ({"preset": "multitask-six"}, "shared", "abs_one"),
    ],
)
def test_another_critic_than_that_of_a_preset_changes_the_reward_clipping(options, critic, reward):
    settings = flatten(resolve(*merge_sources(options)).tables())
    assert (settings["critic"], settings["algo.reward_clipping"]) == (critic, reward)
