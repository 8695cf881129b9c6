"""Validation of options: values, derived options, error messages, and the round trip through TOML."""

import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS
from bestiary.algorithms import ALGORITHMS
from bestiary.config.component_kinds import DEFAULT_COMPONENTS
from bestiary.config.components import REGISTRIES, REQUIRED_ATTRIBUTES
from bestiary.config.resolve import resolve
from bestiary.config.toml import NON_OPTION_TABLES, dump_toml, flatten, read_toml
from bestiary.utils.errors import UserError
from tests.trusted import resolve_own


def problems_of(given, origin=None):
    with pytest.raises(UserError) as error:
        resolve(given, origin)
    return error.value.problems


def from_text(text):
    return resolve(flatten({k: v for k, v in tomllib.loads(text).items() if k not in NON_OPTION_TABLES}))


# --- resolved values ---


def test_defaults():
    config = resolve({"env": "toy/catch"})
    assert config.envs == ("toy/catch",)
    assert {kind: component.name for kind, component in config.components.items()} == {
        **DEFAULT_COMPONENTS,
        "torso": "mlp",
    }
    assert config.training.steps == 100_000  # the default of the toy games
    assert config.components["algo"].options.lr == 5e-4


def test_values_are_converted_from_text():
    config = resolve(
        {
            "env": "atari/Pong",
            "steps": "5M",
            "lr": "1e-3",
            "memory": "lstm",
            "memory.hidden": "512",
            "frame_size": "96x80",
            "sticky": "0.25",
            "gray": "off",
            "torso": "resnet",
            "torso.channels": "8x16",
        }
    )
    assert config.training.steps == 5_000_000
    assert config.components["algo"].options.lr == 1e-3
    assert config.components["memory"].options.hidden == 512
    assert (config.env_options.frame_size, config.env_options.sticky, config.env_options.gray) == (
        (96, 80),
        0.25,
        False,
    )
    assert config.components["torso"].options.channels == (8, 16)


@pytest.mark.parametrize("spelling", ["lr", "algo.lr"])
def test_unprefixed_options_have_two_spellings(spelling):
    assert resolve({"env": "toy/catch", spelling: 0.5}).components["algo"].options.lr == 0.5


@pytest.mark.parametrize("spelling", ["size", "env.size"])
def test_options_of_the_environment_have_two_spellings(spelling):
    assert resolve({"env": "toy/catch", spelling: 6}).env_options.size == 6


@pytest.mark.parametrize(
    ("given", "torso"),
    [
        ({"env": "atari/Pong"}, "shallow"),
        ({"env": "atari/Pong", "frame_size": "30x84"}, "mlp"),
        ({"env": "toy/catch"}, "mlp"),
        ({"env": "toy/recall", "torso": "auto"}, "mlp"),
        ({"env": "toy/catch", "torso": "resnet"}, "resnet"),
    ],
)
def test_torso_auto_depends_on_the_observation(given, torso):
    assert resolve(given).components["torso"].name == torso


@pytest.mark.parametrize("kind", ["algo", "agent", "memory"])
def test_only_the_torso_can_be_auto(kind):
    """For other components, `auto` is an unknown name."""
    (problem,) = problems_of({"env": "toy/catch", kind: "auto"})
    assert problem.startswith(f"--{kind} auto: unknown; expected one of ")


def test_config_builds_environment_agent_and_algorithm():
    config = resolve({"env": "toy/catch", "torso": "resnet", "memory": "gru", "memory.hidden": 32, "size": 12})
    pool = config.make_vector_env(3, seed=0)
    assert pool.observation_spec["image"].shape == (1, 12, 6)
    agent = config.make_agent(pool, seed=1)
    modules = dict(agent.named_children())
    assert type(modules["torso"]) is TORSOS["resnet"]
    assert type(modules["memory"]) is MEMORIES["gru"]
    assert agent.initial_state(3)[0].shape == (3, 1, 32)
    assert type(config.make_algorithm()) is ALGORITHMS["impala"]
    pool.close()


def test_seed_determines_the_weights_and_leaves_the_global_random_state():
    config = resolve({"env": "toy/catch"})
    pool = config.make_vector_env(1, seed=0)
    before = torch.get_rng_state()

    def weights(seed):
        return config.make_agent(pool, seed=seed).state_dict()["policy.weight"]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(before, torch.get_rng_state())


def test_registered_components_have_the_required_attributes():
    for kind, registry in REGISTRIES.items():
        for component in registry.values():
            assert all(hasattr(component, name) for name in REQUIRED_ATTRIBUTES[kind])


# --- error messages ---


def test_all_problems_are_reported_together():
    found = problems_of(
        {
            "env": "toy/catsh",
            "memory": "lsmt",
            "steps": "many",
            "lr": -1,
            "num_envs": 0,
        }
    )
    text = "\n".join(found)
    assert len(found) == 5
    assert "toy/catsh" in text
    assert "did you mean catch?" in text
    assert "--memory lsmt" in text
    assert "did you mean lstm" in text
    assert "--steps many: expected a number" in text
    assert "--lr -1: must be above 0" in text
    assert "--num-envs 0: must be at least 1" in text


def test_no_environment():
    (problem,) = problems_of({})
    assert "no environment given" in problem


def test_tasks_with_different_observations_are_refused():
    (problem,) = problems_of({"env": ["toy/catch", "toy/chain"]})
    assert (
        "one agent cannot play both toy/catch and toy/chain: their observations differ, image uint8[1, 10, 5]"
        in problem
    )


def test_unknown_option_suggests_the_nearest():
    (problem,) = problems_of({"env": "toy/catch", "num_env": 4})
    assert problem.startswith("unknown option --num-env; did you mean --num-envs")


def test_unknown_option_of_a_chosen_component():
    (problem,) = problems_of({"env": "toy/catch", "memory": "lstm", "memory.hiden": 4})
    assert problem.startswith("unknown option --memory.hiden; did you mean --memory.hidden")


def test_option_of_another_component_names_that_component():
    (problem,) = problems_of({"env": "toy/catch", "memory.hidden": 4})
    assert problem.startswith("unknown option --memory.hidden: it is an option of memory ")
    assert "lstm" in problem
    assert "gru" in problem
    (problem,) = problems_of({"env": "toy/catch", "torso": "mlp", "torso.channels": "8"})
    assert problem.startswith("unknown option --torso.channels: it is an option of torso resnet")


def test_unknown_option_names_its_file():
    (problem,) = problems_of({"env": "toy/catch", "nonsense": 1}, {"nonsense": "config a.toml"})
    assert problem.startswith("unknown option --nonsense (in config a.toml)")


def test_options_of_an_unknown_component_are_not_checked():
    (problem,) = problems_of({"env": "toy/catch", "memory": "lsmt", "memory.hidden": 4})
    assert problem.startswith("--memory lsmt: unknown; expected one of ")


def test_choices_and_limits_of_options():
    found = problems_of({"env": "toy/catch", "algo.optimizer": "adan", "algo.discount": 1.5, "seed": -1})
    assert set(found) == {
        "--algo.discount 1.5: must be at most 1",
        "--algo.optimizer adan: expected one of adam, rmsprop, rmsprop_tf; did you mean adam?",
        "--seed -1: must be at least 0",
    }


def test_problem_found_by_the_options_of_an_environment():
    assert problems_of({"env": "toy/catch", "size": 1}) == ("--size 1: must be at least 2",)


@pytest.mark.parametrize(("batch", "envs"), [(32, 32), (32, 8), (8, 32), (1, 7), (7, 1), (48, 16), (32, 12), (33, 32)])
def test_valid_batch_sizes(batch, envs):
    config = resolve({"env": "toy/catch", "batch_size": batch, "num_envs": envs, "runtime": "serial"})
    assert config.training.num_envs == envs


@pytest.mark.parametrize(
    ("num_envs", "num_tasks", "sizes"), [(45, 1, (23, 22)), (1, 1, (1,)), (16, 6, (8, 8)), (7, 6, (7,))]
)
def test_pools_have_an_environment_of_each_task(num_envs, num_tasks, sizes):
    games = "AirRaid Carnival DemonAttack NameThisGame Pong SpaceInvaders".split()[:num_tasks]
    config = resolve({"env": [f"atari/{game}" for game in games], "num_envs": num_envs})
    assert config.training.pool_sizes == sizes
    assert [len(config.training.envs_of_pool(k)) for k in range(len(sizes))] == list(sizes)
    assert config.total_envs == num_envs
    assert sum(len(config.envs_of_task(k)) for k in range(num_tasks)) == num_envs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"num_envs": 1, "pools": 2},
            "--num-envs 1: each of the 2 pools needs at least 1 environment; use at least --num-envs 2",
        ),
        ({"env": "atari/{Pong,Boxing}", "num_envs": 1}, "--num-envs 1: the run has 2 tasks; use at least --num-envs 2"),
        (
            {"env": "atari/{Pong,Boxing}", "num_envs": 3, "pools": 2},
            "--num-envs 3: each of the 2 pools needs at least 2 environments, one per task; use at least --num-envs 4",
        ),
        (
            {"cluster": "auto", "learners": 2, "num_envs": 9},
            "--num-envs 9: with --learners 2, it must be a multiple of --pools 2; try 10",
        ),
        ({"actor_threads": 3}, "--actor-threads 3: must be at most --pools 2"),
        (
            {"num_envs": 64, "batch_size": 8, "max_lag": 2},
            "--max-lag 2: must be at least 3 (the learner makes up to 4 updates with the same rollouts)",
        ),
        ({"num_envs": 8, "batch_size": 16, "lag": 0}, "--lag 0: must be at least 3 (a batch consists of 4 rollouts)"),
        (
            {"algo.reuse": 10, "max_lag": 16},
            "--max-lag 16: must be at least 39 (the learner makes up to 40 updates with the same rollouts)",
        ),
    ],
)
def test_incompatible_pools_batches_and_lags_are_refused(options, words):
    (problem,) = problems_of({"env": "toy/catch", **options})
    assert problem.startswith(words)


# --- round trip through TOML ---


ROUND_TRIPS = [
    {"env": "toy/catch"},
    {"env": "toy/recall", "memory": "gru", "memory.hidden": 7, "delay": 3, "steps": "1k", "seed": 2**63 - 1},
    {
        "env": "atari/Pong",
        "torso": "resnet",
        "torso.channels": "4x8",
        "frame_size": "96x84",
        "sticky": 0.25,
        "gray": "no",
    },
    {
        "env": "gymnasium/CartPole-v1",
        "lr": 1e-7,
        "algo.eps": 1e-12,
        "logger": "wandb,tensorboard",
        "logger.project": 'a "project" \\ of mine',
    },
    {"env": "toy/chain", "logger": ["mlflow"], "logger.project": "Größe 😀"},
]


@pytest.mark.parametrize("given", ROUND_TRIPS, ids=lambda given: given["env"])
def test_config_survives_the_round_trip(given):
    config = resolve(given)
    assert from_text(config.to_toml()) == config


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("torso", TORSOS)
def test_each_component_survives_the_round_trip(torso, memory):
    config = resolve({"env": "atari/Breakout", "torso": torso, "memory": memory})
    assert from_text(config.to_toml()) == config


plain_values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1), plain_values | st.lists(plain_values)
    )
)
def test_dumped_tables_are_valid_toml(table):
    assert tomllib.loads(dump_toml({"table": table})) == {"table": table}


def test_dumped_toml_has_one_line_per_value_and_one_section_per_table():
    top_level = {"seed": 1, "keep_at": [0, 5], "lines": ["a,\n]", "[\n"]}
    tables = {**top_level, "memory": {"name": "lstm", "rate": 1e-5}, "x": {}}
    assert dump_toml(tables).splitlines() == [
        "seed = 1",
        "keep_at = [0, 5]",
        r'lines = ["a,\n]", "[\n"]',
        *("", "[memory]", 'name = "lstm"', "rate = 1e-05"),
        *("", "[x]"),
    ]


def test_versions_are_recorded_and_are_no_options(tmp_path):
    text = resolve({"env": "toy/catch"}).to_toml()
    assert tomllib.loads(text)["versions"]["torch"] == torch.__version__
    (tmp_path / "config.toml").write_text(text)
    assert not any(key.startswith("versions") for key in read_toml(tmp_path / "config.toml"))


def test_flatten_nested_tables():
    tables = {"num-envs": 4, "memory": {"name": "lstm", "num-layers": 2}, "env": {"name": ["toy/catch"], "size": 5}}
    assert flatten(tables) == {
        "num_envs": 4,
        "memory": "lstm",
        "memory.num_layers": 2,
        "env": ["toy/catch"],
        "env.size": 5,
    }
    assert flatten({"memory.num-layers": 2}) == {"memory.num_layers": 2}


# --- derived options ---


@pytest.mark.parametrize(
    ("options", "batch_size", "num_envs"),
    [
        ({"env": "toy/catch"}, 4, 32),
        ({"env": "procgen/{maze,heist,miner}:easy"}, 12, 48),
        ({"env": "procgen/{maze,heist,miner}:easy", "batch_size": 3}, 3, 36),
        ({"env": "procgen/{maze,heist,miner}:easy", "num_envs": 36, "cluster": "local", "learners": 2}, 6, 36),
        ({"env": "procgen/{maze,heist}:easy", "num_envs": 48}, 8, 48),
        ({"env": "procgen/{maze,heist}:easy", "num_envs": 12}, 6, 12),
        ({"env": "procgen/{maze,heist}:easy", "num_envs": 8, "runtime": "serial"}, 8, 8),
    ],
)
def test_batch_size_and_num_envs_scale_with_the_number_of_tasks(options, batch_size, num_envs):
    settings = flatten(resolve(options).tables())
    assert (settings["algo.batch_size"], settings["num_envs"]) == (batch_size, num_envs)


def test_popart_limits_that_exclude_each_other():
    (problem,) = problems_of({"env": "toy/catch", "critic": "popart", "critic.min_sigma": 10, "critic.max_sigma": 1})
    assert "--critic.min-sigma 10 is above --critic.max-sigma 1" in problem


# --- group keys and labels ---


def test_group_key_ignores_the_seed_and_options_without_effect_on_learning():
    base = {"env": "toy/catch", "seed": "1"}
    same: list[dict[str, object]] = [
        {"seed": 2},
        {"logger": "wandb", "logger.project": "project"},
        {"save_every": 5},
        {"save_minutes": 1},
        {"eval_at_end": 3},
    ]
    other: list[dict[str, object]] = [
        {"lr": 0.1},
        {"steps": 5},
        {"memory": "lstm"},
        {"size": 5},
        {"env": "toy/chain"},
        {"num_envs": 16},
    ]
    group = resolve(base).group_key()
    assert all(resolve({**base, **change}).group_key() == group for change in same)
    assert all(resolve({**base, **change}).group_key() != group for change in other)


def test_label_names_environment_and_agent():
    assert resolve({"env": "toy/catch", "memory": "lstm"}).label() == "catch-mlp-lstm"
    assert resolve({"env": "atari/Pong"}).label() == "Pong-shallow"
    assert resolve({"env": ["atari/Pong", "atari/Breakout"]}).label() == "2-atari-shallow"
    Path("mine.py").write_text(
        "from bestiary.envs.toy import ToyVectorEnv\n"
        "class One(ToyVectorEnv):\n"
        "    def __init__(self, num_envs, seed, options):\n"
        "        super().__init__('chain', num_envs, seed, options)\n"
        "class Two(One): pass\n"
    )
    assert resolve_own({"env": ["mine.py:One", "mine.py:Two"]}).label() == "2-mine-One-mlp"
