"""Plug-ins: loading, validation before training starts, and the copies in run folders."""

import copy
import hashlib
import importlib
import pickle
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from bestiary.api import start
from bestiary.config.plugin_options import map_plugins
from bestiary.config.resolve import resolve
from bestiary.config.toml import read_toml
from bestiary.envs import lookup_env
from bestiary.runs.plugin_copies import copy_name
from bestiary.runs.run import RunLocation, create_run, open_run
from bestiary.training.factory import make_actors_and_learner
from bestiary.utils import plugin_names, plugins, trust
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef
from tests.trusted import load_own, resolve_own

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
    config = resolve_own(given)
    pool = config.make_vector_env(1, 0)
    return config.make_agent(pool)


# --- names ---


@pytest.mark.parametrize("name", ["a.py:B", "/x/y/a.py:B", "c:/x/a.py:B_2", " a.py:B ", "a.py:B\n", "\ta b.py:B"])
def test_names_of_plugins_are_parsed_without_white_space(name):
    ref = plugin_names.parse_name(name)
    assert isinstance(ref, PluginRef)
    assert ref == name.strip()
    assert str(ref.path) == name.strip().rpartition(":")[0]
    assert ref.attribute == name.strip().rpartition(":")[2]


@pytest.mark.parametrize(
    "name", ["lstm", "toy/catch", "a.py", "a.py:", "a.txt:B", "a.py:2b", "a.py:B c", ":B", "a.py:{B}"]
)
def test_other_names_are_not_plugins(name):
    assert not isinstance(plugin_names.parse_name(name), PluginRef)


def test_references_are_immutable_and_survive_copies():
    ref = PluginRef(Path("a.py"), "B")
    with pytest.raises(AttributeError):
        ref.path = Path("evil.py")
    for copied in (copy.deepcopy(ref), pickle.loads(pickle.dumps(ref))):
        assert isinstance(copied, PluginRef)
        assert (copied, copied.path, copied.attribute) == (ref, ref.path, ref.attribute)
    assert not isinstance(ref.strip(), PluginRef)


def test_all_options_that_can_name_a_file_are_mapped():
    options = {
        "env": ["x/{a,b}.py:E", " c.py:{F,G}"],
        "torso": "t.py:T ",
        "reward": " r.py:r",
        "true_reward": "alive=1;r.py:s ; r.py:t",
        "callback": "d.py:C, e.py:D",
        "logger": "csv,f.py:L",
        "logger.project": "not.py:Component",
    }
    found = []

    def collect(ref):
        found.append(str(ref))
        return ref

    mapped = map_plugins(options, collect)
    assert found == [
        *(
            "x/a.py:E",
            "x/b.py:E",
            "c.py:F",
            "c.py:G",
            "t.py:T",
            "r.py:r",
            "r.py:s",
            "r.py:t",
            "d.py:C",
            "e.py:D",
            "f.py:L",
        )
    ]
    assert mapped["env"] == ["x/a.py:E", "x/b.py:E", "c.py:F", "c.py:G"]
    assert mapped["true_reward"] == "alive=1; r.py:s; r.py:t"
    assert mapped["callback"] == ["d.py:C", "e.py:D"]
    assert mapped["logger"] == ["csv", "f.py:L"]


@pytest.mark.parametrize("folder", ["a{b}", "a;b"])
def test_path_with_a_character_of_lists_is_refused(write, tmp_path, folder):
    (tmp_path / folder).mkdir()
    path = write(TORSO, f"{folder}/net.py")
    ref = PluginRef(path, "Net")
    with pytest.raises(UserError, match="must not contain"):
        ref.absolute()


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
    assert "the type Missing[int] of argument depth" in error_text(resolve_own, with_torso(write(source)))


def test_options_dataclass_is_used(write):
    path = write(TORSO_WITH_OPTIONS)
    assert make_agent(with_torso(path, **{"torso.width": "8"})).torso.output_size == 8
    assert "--torso.width 65: must be at most 64" in error_text(resolve_own, with_torso(path, **{"torso.width": 65}))


@pytest.mark.parametrize("default", ["(16, 32)", "[16, 32]", "None"])
def test_keyword_defaults_without_annotation_round_trip_through_toml(write, tmp_path, default):
    """`resolve` must accept the config.toml that was written for an accepted configuration."""
    source = (
        TORSO.replace("scale=1.5", f"sizes={default}").replace("self.scale", "self.sizes").replace(", scale", ", sizes")
    )
    source = source.replace("self.sizes * ", "")
    config = resolve_own(with_torso(write(source)))
    (tmp_path / "config.toml").write_text(config.to_toml())
    restored = resolve_own(read_toml(tmp_path / "config.toml"))
    assert restored.to_toml() == config.to_toml()


@pytest.mark.parametrize("folder", ["a b", 'quo"te', "back\\slash", "ünïcode 日本", "tab\tline\n", "#=[,]", "del\x7f"])
def test_run_of_a_plugin_in_a_folder_with_special_characters_is_read_back(write, tmp_path, folder):
    (tmp_path / folder).mkdir()
    path = write(TORSO, f"{folder}/net.py")
    config = resolve_own(with_torso(path))
    run, _ = create_run(config, RunLocation(run_dir=str(tmp_path / "run")))
    restored = open_run(run.path).config
    assert restored == config
    assert restored.plugin_hashes == config.plugin_hashes
    assert restored.components["torso"].name == f"{path}:Net"


def test_configs_with_equal_settings_are_equal(write):
    given = with_torso(write(TORSO))
    assert resolve_own(given) == resolve_own(given)
    assert resolve_own(given) != resolve_own({**given, "torso.width": 8})


@pytest.mark.parametrize(
    ("kind", "name", "source"), [("torso", "Net", TORSO), ("memory", "Sum", MEMORY), ("agent", "Linear", AGENT)]
)
def test_plugin_can_be_trained(write, kind, name, source):
    path = write(source)
    config = resolve_own(
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
    config = resolve_own(with_torso("mine.py"))
    assert config.components["torso"].name == f"{tmp_path}/mine.py:Net"
    sha256 = hashlib.sha256((tmp_path / "mine.py").read_bytes()).hexdigest()
    assert config.plugin_hashes == {f"{tmp_path}/mine.py": sha256}
    assert config.label() == "chain-Net"


def test_changed_file_is_imported_again(write):
    first = load_own(write(TORSO), "Net", "torso")
    second = load_own(write(TORSO + "    marker = 1"), "Net", "torso")
    assert first is not second
    assert load_own(write(TORSO), "Net", "torso") is first


# --- invalid plug-ins ---


def test_missing_file(tmp_path):
    text = error_text(resolve_own, with_torso(tmp_path / "none.py"))
    assert text.startswith(f"{tmp_path}/none.py:Net: ")
    assert "does not exist" in text


def test_missing_name_has_a_suggestion(write):
    text = error_text(resolve_own, with_torso(write(TORSO), "Nte"))
    assert "mine.py has no Nte; did you mean Net?" in text


def test_syntax_error_names_the_line(write):
    path = write("import torch\n\nclass Net(:\n    pass\n")
    text = error_text(resolve_own, with_torso(path))
    assert text.startswith(f"{path}, line 3: cannot be imported: SyntaxError")


@pytest.mark.parametrize("line", ["import no_such_module", "1 / 0", "raise SystemExit(3)"])
def test_import_error_is_reported(write, line):
    modules = set(sys.modules)
    path = write(line + "\n")
    assert error_text(resolve_own, with_torso(path)).startswith(f"{path}: cannot be imported: ")
    assert not any(name.startswith("bestiary_plugin_") for name in set(sys.modules) - modules)


def test_missing_method_is_reported(write):
    source = MEMORY.replace("initial_state", "first_state")
    text = error_text(resolve_own, {"env": "toy/chain", "memory": f"{write(source)}:Sum"})
    assert "not a usable memory: Sum lacks initial_state" in text


def test_value_that_is_not_a_class_is_reported(write):
    text = error_text(load_own, write("value = 5"), "value", "torso")
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
    text = error_text(resolve_own, {"env": "toy/chain", "agent": f"{write(AGENT)}:Linear", "memory": "lstm"})
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
    text = error_text(start, resolve_own(given), location)
    assert "test batch of T=2 steps and B=3 trajectories" in text
    assert not (tmp_path / "run").exists()


# --- run folders and trust ---


@pytest.fixture
def folder(write, tmp_path):
    """Return a run folder with a plug-in torso and the path of the plug-in file."""
    path = write(TORSO)
    run, _ = create_run(resolve_own(with_torso(path)), RunLocation(run_dir=str(tmp_path / "run")))
    return run.path, path


def copied_torso(run):
    (copied,) = (run / "plugins").glob("*/mine.py")
    return f"{copied}:Net"


def test_unchanged_original_is_used(folder):
    run, path = folder
    assert open_run(run).config.components["torso"].name == f"{path}:Net"


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_copy_is_used_if_the_original_has_changed(folder, change, capsys):
    run, path = folder
    if change == "edited":
        path.write_text(path.read_text() + "\nraise AssertionError('this must not be executed')\n")
    else:
        path.unlink()
    config = open_run(run).config
    assert config.components["torso"].name == copied_torso(run)
    assert f"is used instead of {path}" in capsys.readouterr().err
    agent = config.make_agent(config.make_vector_env(1, 0))
    assert agent.state_dict()["torso.layer.weight"].shape[0] == 32


def test_unknown_content_is_executed_only_with_trust_code(folder, another_user, capsys):
    run, _ = folder
    another_user()
    copied = copied_torso(run)
    shown = Path(copied.removesuffix(":Net")).relative_to(Path.cwd())
    text = error_text(lambda: open_run(run).config)
    assert f"read {shown}, then add --trust-code" in text
    assert open_run(run, trust_code=True).config.components["torso"].name == copied
    assert f"executes {shown}" in capsys.readouterr().err
    assert open_run(run).config.components["torso"].name == copied  # its content is trusted now


@pytest.mark.parametrize("content", ["\n# altered\n", None])
def test_altered_copy_is_rejected_even_if_trusted(folder, another_user, content):
    run, path = folder
    copied = Path(copied_torso(run).removesuffix(":Net"))
    if content is None:
        copied.rename(run / "elsewhere.py")
        copied.symlink_to(run / "elsewhere.py")
    else:
        copied.write_text(copied.read_text() + content)
    path.unlink()
    assert "missing or altered" in error_text(lambda: open_run(run, trust_code=True).config)
    another_user()
    assert "missing or altered" in error_text(lambda: open_run(run, trust_code=True).config)


def test_plugin_without_hash_in_the_run_folder_is_rejected(folder):
    run, _ = folder
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config[: config.index("[plugins]")])
    assert "no hash of this file" in error_text(lambda: open_run(run, trust_code=True).config)


def test_copies_of_equal_names_do_not_collide(tmp_path):
    path = tmp_path / "mine.py"
    assert copy_name(path, "a" * 64) != copy_name(path, "b" * 64)
    assert copy_name(path, "a" * 64) == "aaaaaaaa/mine.py"


def test_content_that_no_function_of_trust_has_accepted_is_not_executed(write, tmp_path):
    """`load` refuses every reference unless its content was registered, so a forgotten check is not dangerous."""
    path = write("raise SystemExit('executed')")
    assert "is not executed" in error_text(plugins.load, PluginRef(path, "Net"), "torso")
    assert "is not executed" in error_text(resolve, with_torso(path))
    assert "is not executed" in error_text(lookup_env, f" {path}:Net ")


def test_the_bytes_that_were_checked_are_executed(write):
    path = write("value = 1\nclass Net:\n    pass\n")
    ref = PluginRef(path, "Net")
    trust.trust_named(ref)
    path.write_text("raise SystemExit('a file that was changed after the check')")
    assert plugins.load(ref, "torso").__name__ == "Net"


# --- modules in the folder of a plug-in ---


def registered_modules(path):
    source = trust.registered(path)
    assert source is not None
    return sorted(source.modules)


def test_plugin_imports_modules_of_its_folder(tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 7\n")
    (tmp_path / "net.py").write_text("from beside import SIZE\nclass Net:\n    size = SIZE\n")
    assert load_own(tmp_path / "net.py", "Net", "torso").size == 7
    assert "beside" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_error_in_a_module_beside_a_plugin_names_its_line(tmp_path):
    (tmp_path / "beside2.py").write_text("class Base:\n    def run(self):\n        return 1 / 0\n")
    (tmp_path / "net2.py").write_text("from beside2 import Base\nclass Net(Base): pass\n")
    net = load_own(tmp_path / "net2.py", "Net", "torso")()
    with pytest.raises(ZeroDivisionError) as error:
        net.run()
    assert f"{tmp_path}/beside2.py, line 3: ZeroDivisionError" in str(plugins.describe_error(error.value))


PACKAGE = {
    "net.py": """
        import parts.inner
        import parts.deep.leaf as leaf
        from parts import constant, other
        from . import beside
        import beside as b

        class Net:
            values = (parts.inner.value, leaf.value, constant, other.value, beside.value, b.value)

            def late(self):
                import lazy
                return lazy.value
    """,
    "beside.py": "value = 'beside'",
    "lazy.py": "from beside import value",
    "parts/__init__.py": "constant = 'constant'",
    "parts/inner.py": "from beside import value",
    "parts/other.py": "from .inner import value\nvalue = 'other ' + value",
    "parts/deep/leaf.py": "from ..inner import value\nfrom parts.other import value as v\nvalue = 'leaf ' + v",
    "unused.py": "raise SystemExit('executed')",
}


def test_packages_of_the_folder_can_be_imported_in_all_forms(write, tmp_path):
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    for name, source in PACKAGE.items():
        write(source, name)
    net = load_own(tmp_path / "net.py", "Net", "torso")
    assert net.values == ("beside", "leaf other beside", "constant", "other beside", "beside", "beside")
    assert net().late() == "beside"
    with pytest.raises(ModuleNotFoundError):  # it is not part of the plug-in, because no file imports it
        importlib.import_module(f"{net.__module__}.unused")
    assert sorted(registered_modules(tmp_path / "net.py")) == sorted(PACKAGE.keys() - {"net.py", "unused.py"})


def test_modules_of_the_folder_do_not_replace_other_modules(tmp_path):
    """The standard library and installed packages come first, also for code that is imported later."""
    for name in ("json", "colorsys", "numpy", "bestiary"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')")
    imports = "import json, colorsys, numpy, bestiary\n"
    (tmp_path / "net.py").write_text(imports + "class Net:\n    modules = (json, colorsys, numpy, bestiary)\n")
    for module in load_own(tmp_path / "net.py", "Net", "torso").modules:
        assert not module.__file__.startswith(str(tmp_path))
    assert registered_modules(tmp_path / "net.py") == []


def test_two_plugins_may_have_different_modules_of_one_name(tmp_path):
    found = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "beside.py").write_text(f"SIZE = {number}\n")
        (folder / "net.py").write_text("from beside import SIZE\nclass Net:\n    size = SIZE\n")
        found.append(load_own(folder / "net.py", "Net", "torso").size)
    assert found == [1, 2]


def test_modules_of_the_folder_are_hashed_copied_and_checked(write, tmp_path, another_user):
    write("WIDTH = 32\n", "width.py")
    path = write(TORSO.replace("import torch.nn as nn", "import torch.nn as nn\n    from width import WIDTH"))
    run, _ = create_run(resolve_own(with_torso(path)), RunLocation(run_dir=str(tmp_path / "run")))
    (copied,) = (run.path / "plugins").glob("*/width.py")
    assert copied.read_text() == "WIDTH = 32\n"
    assert open_run(run.path).config.components["torso"].name == f"{path}:Net"
    (tmp_path / "width.py").write_text("raise SystemExit('executed')")
    config = open_run(run.path).config  # the copies are executed
    assert config.components["torso"].name == copied_torso(run.path)
    assert config.make_agent(config.make_vector_env(1, 0)) is not None
    another_user()
    assert "and the other files in its folder" in error_text(lambda: open_run(run.path).config)
    copied.write_text("raise SystemExit('executed')")
    assert "missing or altered" in error_text(lambda: open_run(run.path, trust_code=True).config)
    copied.unlink()
    assert "missing or altered" in error_text(lambda: open_run(run.path, trust_code=True).config)
    copied.write_text("WIDTH = 32\n")
    assert open_run(run.path, trust_code=True).config.components["torso"].name == copied_torso(run.path)
