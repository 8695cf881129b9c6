"""Weightings of components: how they are written, what they pay, and what is wrong with those that are not."""

import numpy as np
import pytest

from bestiary.config import make_pool
from bestiary.envs import make
from bestiary.envs.atari import COMPONENTS as ATARI
from bestiary.envs.rewards import RewardedPool, Rewards
from bestiary.envs.riverraid import COMPONENTS as RIVERRAID
from bestiary.envs.warehouse import WarehousePool
from bestiary.envs.weightings import ALWAYS, GENERIC, Component, Term, Weighting, canonical, make_reward
from bestiary.errors import RunError, UserError
from bestiary.rollout import Arrays

KNOWN = {
    name: Component("") for name in "reward alive changed score fuel_shot bullet moved off_center fuel fire".split()
}
RIVER = "atari/Riverraid"


def weights(text: str) -> dict[str, float]:
    reward = make_reward(text, KNOWN, RIVER)
    assert isinstance(reward, Weighting)
    return {term.component: term.weight for term in reward.terms}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fuel:10", {"score": 1, "fuel_shot": 720}),
        ("fuel:0", {"score": 1, "fuel_shot": -80}),
        ("pacifist:20", {"alive": 10, "bullet": -20}),
        ("pacifist:20:20", {"alive": 20, "bullet": -20}),
        ("smooth:5", {"alive": 10, "moved": -5}),
        ("center:1", {"alive": 10, "off_center": -0.05}),
        ("score=1", {"score": 1}),
        (" score = 1 , moved = -2.5 ", {"score": 1, "moved": -2.5}),
        ("pacifist:20,moved=-1", {"alive": 10, "bullet": -20, "moved": -1}),
        ("pacifist:20,smooth:5", {"alive": 20, "bullet": -20, "moved": -5}),
        ("survival:0.5", {"alive": 0.5}),
        ("peaceful:2", {"score": 1, "fire": -2}),
        ("steady:3", {"reward": 1, "changed": -3}),
        ("scaled:1k", {"reward": 1000}),
        ("fuel:10,fuel=-2", {"score": 1, "fuel_shot": 720, "fuel": -2}),  # what is shot, and what is in the tank
    ],
)
def test_what_is_written_and_what_it_weighs(text: str, expected: dict[str, float]) -> None:
    assert weights(text) == pytest.approx(expected)


def test_nothing_is_the_environments_own_reward() -> None:
    assert make_reward(None, KNOWN, RIVER) == Weighting((Term("reward", 1.0),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gold=1", "atari/Riverraid has no component gold; it has reward, alive"),
        ("mooved=1", "did you mean moved"),
        ("gold:1", "there is no reward 'gold'"),
        ("moved:1", r"a component is written moved=WEIGHT"),
        ("pacifist=1", r"a named reward is written pacifist:STRENGTH"),
        ("fuel", "fuel needs a strength"),
        ("fuel:much", "the strength of fuel is 'much', which is no number"),
        ("score=nan", "the weight of score is 'nan', which is no number"),
        ("fuel:1:2", "fuel is written fuel:STRENGTH"),
        ("score=1,score=2", "score is there twice"),
        ("score=1@life=1,score=2@life=1", "score is there twice"),
        ("fuel:1,fuel:2", "fuel is there twice"),
        ("fuel:10,score=1", "fuel and score=... contradict each other"),
        ("score=1@life=0", r"@life=0 is no scope: it is written @life=1"),
        ("score=1@steps=9:3", r"@steps=9:3 is no scope"),
        ("score=1@often", r"@often is no scope: it is written @steps=0:500, @life=1"),
        ("capped:0", "a limit must be above 0"),
        (
            "pacifist:-20",
            r"would pay for what it is there to charge for: write pacifist:20 \(or, to pay for it, bullet=",
        ),
        ("score=1e39", "the weight of score is 1e39: at most 1e\\+30"),
        ("fuel:10,peaceful:1", "fuel and peaceful both have score in them, .* twice: write fuel:10,fire=-1"),
        ("scaled:2,capped:5", "scaled and capped both have reward in them, .* leave one out"),
        ("fuel:10@life=1,peaceful:1@steps=9:", "both have score in them"),
        ("", "there is no reward ''"),
    ],
)
def test_mistakes_are_named(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_reward(text, KNOWN, RIVER)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fuel:10,steady:1", "both have score in them, which would count twice: write fuel:10,changed=-1"),
        ("fuel:10,capped:50", "both have score in them, which would count twice: write capped:50,fuel_shot=720"),
        ("fuel:10,reward=1", "fuel and reward=... contradict each other: fuel already has score=1"),
        ("score=1,reward=1", "score and reward are the same thing here"),
    ],
)
def test_a_component_under_another_name_counts_once(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_reward(text, {**GENERIC, **ATARI, **RIVERRAID}, RIVER)


def test_named_rewards_may_follow_each_other() -> None:
    reward = make_reward("fuel:10@life=1,peaceful:1@life=2", KNOWN, RIVER)
    assert str(reward) == "score=1@life=1,fuel_shot=720@life=1,score=1@life=2,fire=-1@life=2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("collected=1@life=2", "collected=1@life=2 never counts: warehouse has one life"),
        ("collected=1@every=1000", "never counts: a game of warehouse has at most 100 decisions"),
        ("collected=1@steps=100:", "never counts: a game of warehouse has at most 100 decisions"),
    ],
)
def test_what_never_counts_is_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        RewardedPool(make("warehouse"), Rewards(None, text))


def test_the_same_reward_written_otherwise() -> None:
    known = {**GENERIC, **ATARI, **RIVERRAID}
    ways = ["fuel:10", "fuel_shot=720.0, score=1.0", "reward=1,fuel_shot=720"]
    assert len({canonical(make_reward(text, known, RIVER), known) for text in ways}) == 1
    assert canonical(make_reward("fuel:11", known, RIVER), known) != canonical(
        make_reward("fuel:10", known, RIVER), known
    )


def test_a_named_reward_of_another_game() -> None:
    with pytest.raises(UserError, match="fuel is a reward of atari/Riverraid, not of atari/Pong"):
        make_reward("fuel:10", KNOWN, "atari/Pong")


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("", [5, 5, 5, 5, 5, 5]),
        ("@steps=1:3", [0, 5, 5, 0, 0, 0]),
        ("@steps=4:", [0, 0, 0, 0, 5, 5]),
        ("@life=1", [5, 5, 5, 0, 0, 0]),
        ("@every=2", [0, 5, 0, 5, 0, 5]),
        ("@max=2", [2, 2, 2, 2, 2, 2]),
        ("@life=2@every=2@max=3", [0, 0, 0, 3, 0, 3]),
        ("@steps=0:2,score=2@steps=4:9", [5, 5, 0, 0, 10, 10]),
    ],
)
def test_scopes(scope: str, expected: list[float]) -> None:
    reward = make_reward(f"score=1{scope}", KNOWN, RIVER)
    clock, life = np.arange(6), np.array([1, 1, 1, 2, 2, 2])
    assert reward({"score": np.full(6, 5.0, np.float32)}, clock, life).tolist() == expected
    assert str(reward) == f"score=1{scope}"


def play(pool: RewardedPool, length: int, seed: int = 0) -> list[Arrays]:
    """The measures of some random steps, with reward, done and actions among them."""
    rng = np.random.default_rng(seed)
    pool.reset()
    found = []
    for _ in range(length):
        actions = rng.integers(0, pool.action_spec.n, pool.num_envs)
        pool.send(actions)
        step = pool.recv()
        found.append({**step.measures, "paid": step.reward, "done": step.done, "action": actions})
    return found


def test_the_warehouses_components_recomputed_one_by_one() -> None:
    inner = make("warehouse", num_envs=3, seed=2)
    assert isinstance(inner, WarehousePool)
    pool = RewardedPool(inner, Rewards("on_shelf=1,left_half=2", "collected=1; expired=-1"))
    rng, before = np.random.default_rng(1), -np.ones(3)
    pool.reset()
    collected = 0
    for t in range(1, 251):
        ages, robots = inner.ages, inner.robots
        actions = rng.integers(0, 4, 3)
        pool.send(actions)
        step = pool.recv()
        for i in range(3):
            moves = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}[int(actions[i])]
            cell = [min(max(int(c) + m, 0), 6) for c, m in zip(robots[i], moves, strict=True)]
            places = [list(map(int, shelf)) for shelf in inner.shelves]
            age = int(ages[i][places.index(cell)]) if cell in places else -1
            got, eldest = age >= 0, int(ages[i].max())
            expected = {
                "on_shelf": cell in places,
                "moved": cell != [int(c) for c in robots[i]],
                "collected": got,
                "left_half": got and cell[1] < 3,
                "oldest_first": got and age == eldest,
                "age_share": (age + 1) / (eldest + 1) if got else 0,
                "alive": 1,
                "changed": before[i] >= 0 and before[i] != actions[i],
                "reward": got,
            }
            expected["trained"] = expected["on_shelf"] + 2 * expected["left_half"]
            expected["true"] = got
            expected["true_2"] = -step.measures["expired"][i]
            for name, value in expected.items():
                assert step.measures[name][i] == pytest.approx(float(value)), (name, t, i)
            assert step.reward[i] == expected["trained"]
            collected += got
        before = np.where(step.done, -1, actions)
    assert collected > 10


def test_watching_changes_nothing_but_the_measures() -> None:
    plain, watched = make("warehouse", num_envs=4, seed=5), make("warehouse", num_envs=4, seed=5)
    pool = RewardedPool(watched, Rewards(None, "expired=-1"))
    rng = np.random.default_rng(0)
    first, other = plain.reset(), pool.reset()
    for _ in range(120):
        assert (first.observation["vector"] == other.observation["vector"]).all()
        assert (first.reward == other.reward).all()
        assert (first.done == other.done).all()
        assert set(other.measures) == set(pool.measures_spec)
        actions = rng.integers(0, 4, 4)
        plain.send(actions)
        pool.send(actions)
        first, other = plain.recv(), pool.recv()


def test_a_saved_pool_goes_on_in_the_middle_of_its_scopes() -> None:
    rewards = Rewards("collected=1@steps=20:70,changed=-1@every=3", None)

    def opened() -> RewardedPool:
        return RewardedPool(make("warehouse", num_envs=2, seed=1), rewards)

    one, other = opened(), opened()
    play(one, 33)
    other.load(one.save())
    rng = np.random.default_rng(3)
    for _ in range(120):
        actions = rng.integers(0, 4, 2)
        for pool in (one, other):
            pool.send(actions)
        mine, theirs = one.recv(), other.recv()
        assert {k: v.tolist() for k, v in mine.measures.items()} == {k: v.tolist() for k, v in theirs.measures.items()}


def test_any_environment_has_components() -> None:
    pool = RewardedPool(make("toy/chain", num_envs=2, seed=1), Rewards("alive=-0.1,reward=1", None))
    for step in play(pool, 40):
        np.testing.assert_allclose(step["paid"], step["reward"] - 0.1, rtol=1e-6)
        np.testing.assert_array_equal(step["true"], step["reward"])


def test_tasks_with_different_components_share_what_both_have() -> None:
    from bestiary.envs.atari import AtariPool

    options = AtariPool.Options(full_actions=True)
    pool = make_pool([RIVER, "atari/Pong"], options, 2, 0, rewards=Rewards("peaceful:1", "lives_lost=-1"))
    step = pool.reset()
    assert {"score", "fire", "lives_lost", "trained", "true"} <= set(step.measures)
    assert "bullet" not in step.measures
    pool.send(np.array([1, 0]))
    assert pool.recv().measures["fire"].tolist() == [1, 0]
    pool.close()
    with pytest.raises(UserError, match="not of atari/Pong"):
        make_pool([RIVER, "atari/Pong"], options, 2, 0, rewards=Rewards("fuel:2", None))


def test_a_reward_that_is_not_finite_says_in_which_step(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def late(measures):\n    late.calls = getattr(late, 'calls', 0) + 1\n"
        "    return measures['reward'] + (np.nan if late.calls == 7 else 0)\n"
        "def fails(measures):\n    return measures['gold']\n"
        "def wide(measures):\n    return np.zeros((3, 3))\n"
        "def nothing(measures):\n    pass\n"
    )
    with pytest.raises(RunError, match=r"late is nan in decision 7 of a game of environment 0"):
        play(RewardedPool(make("warehouse", num_envs=2), Rewards(f"{file}:late", None)), 9)
    with pytest.raises(RunError, match=r"--true-reward .*fails failed: .*mine.py, line 6: KeyError"):
        play(RewardedPool(make("toy/chain", num_envs=2), Rewards(None, f"alive=1; {file}:fails")), 9)
    with pytest.raises(RunError, match=r"--reward .*wide gave an array of shape \(3, 3\), not the rewards of 2"):
        play(RewardedPool(make("toy/chain", num_envs=2), Rewards(f"{file}:wide", None)), 9)
    with pytest.raises(RunError, match=r"--reward .*nothing gave None, not the rewards of 2"):
        play(RewardedPool(make("toy/chain", num_envs=2), Rewards(f"{file}:nothing", None)), 9)


def test_functions_stand_beside_other_true_rewards(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def twice(m):\n    return 2 * m['reward']\ndef thrice(m):\n    return 3 * m['reward']\n")
    rewards = Rewards(None, f"{file}:twice; alive=1; {file}:thrice")
    for step in play(RewardedPool(make("toy/chain", num_envs=2, seed=1), rewards), 20):
        np.testing.assert_array_equal(step["true"], 2 * step["reward"])
        np.testing.assert_array_equal(step["true_2"], np.ones(2))
        np.testing.assert_array_equal(step["true_3"], 3 * step["reward"])


def test_a_function_cannot_change_what_others_see(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def greedy(measures):\n    paid = measures['reward']\n    paid += 5\n    return paid\n")
    pool = RewardedPool(make("toy/chain", num_envs=2, seed=1), Rewards(f"{file}:greedy", None))
    for step in play(pool, 20):
        np.testing.assert_array_equal(step["paid"], step["reward"] + 5)
        np.testing.assert_array_equal(step["true"], step["reward"])
    assert step["reward"].max() < 5


def test_a_scope_without_limits_is_the_usual_one() -> None:
    reward = make_reward("score=1", KNOWN, RIVER)
    assert isinstance(reward, Weighting)
    assert reward.terms[0].scope is ALWAYS
