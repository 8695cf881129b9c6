"""Plug-ins: loading, validation before training starts, and the copies in run folders."""

import sys
import textwrap

import pytest
import torch

from bestiary.api import start
from bestiary.config.resolve import resolve
from bestiary.config.toml import read_toml
from bestiary.runs.run import RunLocation, create_run, open_run
from bestiary.training.factory import make_actors_and_learner
from bestiary.utils import plugins
from bestiary.utils.errors import UserError

TORSO = """
    import torch.nn as nn

    class Net(nn.Module):
        def __init__(self, spec, *, width: int = 32, scale=1.5):
            super().__init__()
            self.layer = nn.Linear(spec["vector"].shape[0], width)
            self.output_size, self.scale = width, scale

        def forward(self, observation):
            return self.scale * self.layer(observation["vector"])
"""

TORSO_WITH_OPTIONS = """
    from dataclasses import dataclass
    import torch.nn as nn
    from bestiary.utils.options import option

    class Net(nn.Module):
        @dataclass(frozen=True)
        class Options:
            width: int = option(32, "units", low=1, high=64)

        def __init__(self, spec, options=Options()):
            super().__init__()
            self.layer = nn.Linear(spec["vector"].shape[0], options.width)
            self.output_size = options.width

        def forward(self, observation):
            return self.layer(observation["vector"])
"""

MEMORY = """
    import torch
    import torch.nn as nn

    class Sum(nn.Module):
        def __init__(self, input_size):
            super().__init__()
            self.output_size = input_size

        def initial_state(self, batch_size):
            return (torch.zeros(batch_size, self.output_size),)

        def forward(self, x, done, state):
            outputs, (total,) = [], state
            for t in range(len(x)):
                total = torch.where(done[t][:, None], 0.0, total) + x[t]
                outputs.append(total)
            return torch.stack(outputs), (total,)
"""

AGENT = """
    import torch
    import torch.nn as nn
    from bestiary.agents.agent import Output
    from bestiary.agents.distributions import Categorical

    class Linear(nn.Module):
        def __init__(self, observation, action):
            super().__init__()
            self.head = nn.Linear(observation["vector"].shape[0], action.n + 1)

        def initial_state(self, batch_size):
            return ()

        def forward(self, inputs, state):
            x = self.head(inputs.observation["vector"])
            return Output(Categorical(x[..., 1:]), x[..., 0]), state
"""


@pytest.fixture
def write(tmp_path):
    def write(source, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write


def with_torso(path, name="Net", **options):
    return {"env": "toy/chain", "torso": f"{path}:{name}", "steps": 100, "num_envs": 2, "batch_size": 2, **options}


def error_text(function, *args):
    with pytest.raises(UserError) as error:
        function(*args)
    return "\n".join(error.value.problems)


def make_agent(given):
    config = resolve(given)
    pool = config.make_vector_env(1, 0)
    return config.make_agent(pool)


# --- names ---


@pytest.mark.parametrize("name", ["a.py:B", "/x/y/a.py:B", "~/a.py:B", "c:/x/a.py:B_2"])
def test_is_plugin(name):
    assert plugins.is_plugin(name)


@pytest.mark.parametrize("name", ["lstm", "toy/catch", "a.py", "a.py:", "a.txt:B", "a.py:2b", "a.py:B c", ":B"])
def test_is_not_plugin(name):
    assert not plugins.is_plugin(name)


# --- valid plug-ins ---


def test_keyword_only_arguments_become_options(write):
    agent = make_agent(with_torso(write(TORSO), **{"torso.width": "8", "torso.scale": "0.5"}))
    assert (agent.torso.output_size, agent.torso.scale) == (8, 0.5)
    assert make_agent(with_torso(write(TORSO))).torso.output_size == 32


def test_annotations_may_be_texts(write):
    """With `from __future__ import annotations`, the types of the arguments are texts."""
    source = "    from __future__ import annotations\n    from typing import Optional\n" + TORSO.replace(
        "scale=1.5", "scale: float = 1.5, depth: Optional[int] = None"
    )
    agent = make_agent(with_torso(write(source), **{"torso.width": "8", "torso.depth": "3"}))
    assert agent.torso.output_size == 8
    source = source.replace("Optional[int]", "Missing[int]")
    assert "the type Missing[int] of argument depth" in error_text(resolve, with_torso(write(source)))


def test_options_dataclass_is_used(write):
    path = write(TORSO_WITH_OPTIONS)
    assert make_agent(with_torso(path, **{"torso.width": "8"})).torso.output_size == 8
    assert "--torso.width 65: must be at most 64" in error_text(resolve, with_torso(path, **{"torso.width": 65}))


@pytest.mark.parametrize("default", ["(16, 32)", "[16, 32]", "None"])
def test_keyword_defaults_without_annotation_round_trip_through_toml(write, tmp_path, default):
    """`resolve` must accept the config.toml that was written for an accepted configuration."""
    source = (
        TORSO.replace("scale=1.5", f"sizes={default}").replace("self.scale", "self.sizes").replace(", scale", ", sizes")
    )
    source = source.replace("self.sizes * ", "")
    config = resolve(with_torso(write(source)))
    (tmp_path / "config.toml").write_text(config.to_toml())
    restored = resolve(read_toml(tmp_path / "config.toml"))
    assert restored.to_toml() == config.to_toml()


@pytest.mark.parametrize("folder", ["a b", 'quo"te', "back\\slash", "ünïcode 日本", "tab\tline\n", "#=[,]", "del\x7f"])
def test_run_of_a_plugin_in_a_folder_with_special_characters_is_read_back(write, tmp_path, folder):
    (tmp_path / folder).mkdir()
    path = write(TORSO, f"{folder}/net.py")
    config = resolve(with_torso(path))
    run, _ = create_run(config, RunLocation(run_dir=str(tmp_path / "run")))
    restored = open_run(run.path).config
    assert restored == config
    assert restored.plugin_hashes == config.plugin_hashes
    assert restored.components["torso"].name == f"{path}:Net"


def test_configs_with_equal_settings_are_equal(write):
    given = with_torso(write(TORSO))
    assert resolve(given) == resolve(given)
    assert resolve(given) != resolve({**given, "torso.width": 8})


@pytest.mark.parametrize(
    ("kind", "name", "source"), [("torso", "Net", TORSO), ("memory", "Sum", MEMORY), ("agent", "Linear", AGENT)]
)
def test_plugin_can_be_trained(write, kind, name, source):
    path = write(source)
    config = resolve(
        {"env": "toy/chain", kind: f"{path}:{name}", "steps": 100, "num_envs": 2, "batch_size": 2, "runtime": "serial"}
    )
    (actor,), learner = make_actors_and_learner(config)
    actor.start()
    before = [p.detach().clone() for p in learner.parameters]
    learner.learn([actor.collect()])
    assert learner.skipped_updates == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))


def test_plugin_name_becomes_absolute(write, tmp_path, monkeypatch):
    write(TORSO)
    monkeypatch.chdir(tmp_path)
    config = resolve(with_torso("mine.py"))
    assert config.components["torso"].name == f"{tmp_path}/mine.py:Net"
    assert config.plugin_hashes == {f"{tmp_path}/mine.py": plugins.file_sha256(tmp_path / "mine.py")}
    assert config.label() == "chain-Net"


def test_changed_file_is_imported_again(write):
    first = plugins.load(f"{write(TORSO)}:Net", "torso")
    second = plugins.load(f"{write(TORSO + '    marker = 1')}:Net", "torso")
    assert first is not second
    assert plugins.load(f"{write(TORSO)}:Net", "torso") is first


# --- invalid plug-ins ---


def test_missing_file(tmp_path):
    text = error_text(resolve, with_torso(tmp_path / "none.py"))
    assert text.startswith(f"{tmp_path}/none.py:Net: ")
    assert "does not exist" in text


def test_missing_name_has_a_suggestion(write):
    text = error_text(resolve, with_torso(write(TORSO), "Nte"))
    assert "mine.py has no Nte; did you mean Net?" in text


def test_syntax_error_names_the_line(write):
    path = write("import torch\n\nclass Net(:\n    pass\n")
    text = error_text(resolve, with_torso(path))
    assert text.startswith(f"{path}, line 3: cannot be imported: SyntaxError")


@pytest.mark.parametrize("line", ["import no_such_module", "1 / 0", "raise SystemExit(3)"])
def test_import_error_is_reported(write, line):
    modules = set(sys.modules)
    path = write(line + "\n")
    assert error_text(resolve, with_torso(path)).startswith(f"{path}: cannot be imported: ")
    assert not any(name.startswith("bestiary_plugin_") for name in set(sys.modules) - modules)


def test_missing_method_is_reported(write):
    source = MEMORY.replace("initial_state", "first_state")
    text = error_text(resolve, {"env": "toy/chain", "memory": f"{write(source)}:Sum"})
    assert "not a usable memory: Sum lacks initial_state" in text


def test_value_that_is_not_a_class_is_reported(write):
    text = error_text(plugins.load, f"{write('value = 5')}:value", "torso")
    assert "not a usable torso: value is not a class or function" in text


def test_missing_output_size(write):
    source = TORSO.replace("self.output_size, self.scale = width, scale", "self.scale = scale")
    text = error_text(make_agent, with_torso(write(source)))
    assert "not a usable torso: the constructor must set self.output_size" in text


def test_required_argument_without_default(write):
    text = error_text(make_agent, with_torso(write(TORSO.replace("width: int = 32", "width: int"))))
    assert "the constructor failed: TypeError" in text
    assert "width" in text


def test_failing_constructor_is_reported(write):
    """The most common mistake: an image torso for an environment without images."""
    text = error_text(make_agent, with_torso(write(TORSO.replace('spec["vector"]', 'spec["image"]'))))
    assert "the constructor failed: KeyError" in text


def test_failing_agent_constructor_is_reported(write):
    path = write(AGENT.replace("observation, action):", "observation):"))
    text = error_text(make_agent, {"env": "toy/chain", "agent": f"{path}:Linear"})
    assert "the constructor failed: TypeError" in text


def test_option_of_a_component_that_the_agent_lacks_is_reported(write):
    text = error_text(resolve, {"env": "toy/chain", "agent": f"{write(AGENT)}:Linear", "memory": "lstm"})
    assert text.startswith("unknown option --memory")


@pytest.mark.parametrize(
    ("kind", "name", "source"),
    [
        ("torso", "Net", TORSO.replace("return self.scale * self.layer", "return self.layer.weight.sum() + 0 * ")),
        (
            "torso",
            "Net",
            TORSO.replace("self.output_size, self.scale = width", "self.output_size, self.scale = width + 1"),
        ),
        ("torso", "Net", TORSO.replace("def forward", "def backward")),
        ("memory", "Sum", MEMORY.replace("return torch.stack(outputs), ", "return outputs[-1], ")),
        ("memory", "Sum", MEMORY.replace("torch.stack(outputs)", "torch.stack(outputs, dim=1)")),
    ],
    ids=["not width", "not output_size", "no forward", "only the last step", "batch before time"],
)
def test_wrong_output_shape_is_reported_before_training_starts(write, tmp_path, kind, name, source):
    path = write(source)
    given = {"env": "toy/chain", kind: f"{path}:{name}", "steps": 100}
    location = RunLocation(run_dir=str(tmp_path / "run"))
    text = error_text(start, resolve(given), location)
    assert "test batch of T=2 steps and B=3 trajectories" in text
    assert not (tmp_path / "run").exists()


# --- run folders and trust ---


@pytest.fixture
def folder(write, tmp_path):
    """Return a run folder with a plug-in torso and the path of the plug-in file."""
    path = write(TORSO)
    run, _ = create_run(resolve(with_torso(path)), RunLocation(run_dir=str(tmp_path / "run")))
    return run.path, path


def test_unchanged_original_is_used(folder):
    run, path = folder
    assert open_run(run).config.components["torso"].name == f"{path}:Net"


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_changed_original_is_rejected(folder, change):
    run, path = folder
    if change == "edited":
        path.write_text(path.read_text() + "\nraise AssertionError('this must not be imported')\n")
    else:
        path.unlink()
    text = error_text(lambda: open_run(run).config)
    assert ("has changed since" if change == "edited" else "no longer exists") in text
    assert "--trust-code" in text


def test_trusted_copy_is_used(folder):
    run, path = folder
    path.unlink()
    config = open_run(run, trust_code=True).config
    copied, attribute = plugins.split_name(config.components["torso"].name)
    assert copied.parent.resolve() == (run / "plugins").resolve()
    assert attribute == "Net"
    pool = config.make_vector_env(1, 0)
    agent = config.make_agent(pool)
    assert agent.state_dict()["torso.layer.weight"].shape[0] == 32


def test_altered_copy_is_rejected_even_if_trusted(folder):
    run, path = folder
    path.unlink()
    (copy,) = (run / "plugins").iterdir()
    copy.write_text(copy.read_text() + "\n# altered\n")
    assert "missing or altered" in error_text(lambda: open_run(run, trust_code=True).config)


def test_file_without_record_in_the_run_folder_is_rejected(tmp_path):
    text = error_text(plugins.resolve_trusted, f"{tmp_path}/other.py:Net", tmp_path, {}, True)
    assert "no hash of this file" in text


def test_copies_of_equal_names_do_not_collide(tmp_path):
    path = tmp_path / "mine.py"
    assert plugins.copy_name(path, "a" * 64) != plugins.copy_name(path, "b" * 64)
    assert plugins.copy_name(path, "a" * 64) == "mine-aaaaaaaa.py"


def test_plugin_imports_modules_of_its_directory(tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 7\n")
    (tmp_path / "net.py").write_text("from beside import SIZE\nclass Net:\n    size = SIZE\n")
    assert plugins.load(f"{tmp_path}/net.py:Net", "torso").size == 7


def test_error_in_a_module_beside_a_plugin_names_its_line(tmp_path):
    (tmp_path / "beside2.py").write_text("class Base:\n    def run(self):\n        return 1 / 0\n")
    (tmp_path / "net2.py").write_text("from beside2 import Base\nclass Net(Base): pass\n")
    net = plugins.load(f"{tmp_path}/net2.py:Net", "torso")()
    with pytest.raises(ZeroDivisionError) as error:
        net.run()
    assert f"{tmp_path}/beside2.py, line 3: ZeroDivisionError" in str(plugins.describe_error(error.value))
