"""Reward specifications: weights, scopes, canonical texts and error messages."""

import numpy as np
import pytest

from bestiary.envs import make_env
from bestiary.envs.atari import COMPONENTS as ATARI
from bestiary.envs.rewards.components import COMMON_COMPONENTS, RewardComponent
from bestiary.envs.rewards.parser import make_reward
from bestiary.envs.rewards.reward_functions import ALWAYS, Term, WeightedReward, canonical_reward
from bestiary.envs.rewards.wrapper import RewardConfig, RewardWrapper
from bestiary.envs.riverraid_rewards import COMPONENTS as RIVERRAID
from bestiary.utils.errors import UserError

KNOWN = {
    name: RewardComponent("")
    for name in "reward alive changed score fuel_shot bullet moved off_center fuel fire".split()
}
RIVER = "atari/Riverraid"


def weights(text: str) -> dict[str, float]:
    reward = make_reward(text, KNOWN, RIVER)
    assert isinstance(reward, WeightedReward)
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
        ("fuel:10,fuel=-2", {"score": 1, "fuel_shot": 720, "fuel": -2}),  # named reward and component of the same name
    ],
)
def test_weights_of_a_specification(text: str, expected: dict[str, float]) -> None:
    assert weights(text) == pytest.approx(expected)


def test_no_specification_is_the_reward_of_the_environment() -> None:
    assert make_reward(None, KNOWN, RIVER) == WeightedReward((Term("reward", 1.0),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gold=1", "atari/Riverraid has no component gold; it has reward, alive"),
        ("mooved=1", "did you mean moved"),
        ("gold:1", "unknown reward 'gold'"),
        ("moved:1", r"a component is written moved=WEIGHT"),
        ("pacifist=1", r"a named reward is written pacifist:STRENGTH"),
        ("fuel", "fuel needs a strength"),
        ("fuel:much", "the strength of fuel is 'much', which is not a number"),
        ("score=nan", "the weight of score is 'nan', which is not a number"),
        ("fuel:1:2", "fuel has 2 numbers.*write fuel:STRENGTH"),
        ("score=1,score=2", "score occurs twice"),
        ("score=1@life=1,score=2@life=1", "score occurs twice"),
        ("fuel:1,fuel:2", "fuel occurs twice"),
        ("fuel:10,score=1", "fuel and score=... contradict each other"),
        ("score=1@life=0", r"@life=0 is not a scope.*@life=1"),
        ("score=1@steps=9:3", r"@steps=9:3 is not a scope"),
        ("score=1@often", r"@often is not a scope.*@steps=0:500, @life=1"),
        ("capped:0", "the limit must be above 0"),
        (
            "pacifist:-20",
            r"would reward bullet, which pacifist penalises; write pacifist:20 \(to reward bullet, write bullet=",
        ),
        ("score=1e39", "the weight of score is 1e39.*from -1e\\+30 to 1e\\+30"),
        ("fuel:10,peaceful:1", "fuel and peaceful both contain score, .* twice: write fuel:10,fire=-1"),
        ("scaled:2,capped:5", "scaled and capped both contain reward, .* remove one"),
        ("fuel:10@life=1,peaceful:1@steps=9:", "both contain score"),
        ("", "unknown reward ''"),
    ],
)
def test_invalid_specifications_are_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_reward(text, KNOWN, RIVER)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fuel:10,steady:1", "both contain score, which would count twice: write fuel:10,changed=-1"),
        ("fuel:10,capped:50", "both contain score, which would count twice: write capped:50,fuel_shot=720"),
        ("fuel:10,reward=1", "fuel and reward=... contradict each other: fuel already contains score=1"),
        ("score=1,reward=1", "score and reward are the same component"),
    ],
)
def test_aliases_of_a_component_must_not_count_twice(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_reward(text, {**COMMON_COMPONENTS, **ATARI, **RIVERRAID}, RIVER)


def test_named_rewards_in_disjoint_scopes_may_share_components() -> None:
    reward = make_reward("fuel:10@life=1,peaceful:1@life=2", KNOWN, RIVER)
    assert str(reward) == "score=1@life=1,fuel_shot=720@life=1,score=1@life=2,fire=-1@life=2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("collected=1@life=2", "collected=1@life=2 never counts: warehouse has one life"),
        ("collected=1@every=1000", "never counts: a game of warehouse has at most 100 steps"),
        ("collected=1@steps=100:", "never counts: a game of warehouse has at most 100 steps"),
    ],
)
def test_terms_that_never_count_are_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        RewardWrapper(make_env("warehouse"), RewardConfig(None, text))


def test_equal_rewards_have_the_same_canonical_text() -> None:
    known = {**COMMON_COMPONENTS, **ATARI, **RIVERRAID}
    equal = ["fuel:10", "fuel_shot=720.0, score=1.0", "reward=1,fuel_shot=720"]
    assert len({canonical_reward(make_reward(text, known, RIVER), known) for text in equal}) == 1
    assert canonical_reward(make_reward("fuel:11", known, RIVER), known) != canonical_reward(
        make_reward("fuel:10", known, RIVER), known
    )


def test_a_named_reward_of_another_game_is_refused() -> None:
    with pytest.raises(
        UserError, match="fuel needs the components score and fuel_shot, but atari/Pong does not have all of them"
    ):
        make_reward("fuel:10", {**COMMON_COMPONENTS, **ATARI}, "atari/Pong")


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
def test_scopes_limit_where_and_how_much_a_term_counts(scope: str, expected: list[float]) -> None:
    reward = make_reward(f"score=1{scope}", KNOWN, RIVER)
    clock, life = np.arange(6), np.array([1, 1, 1, 2, 2, 2])
    assert reward({"score": np.full(6, 5.0, np.float32)}, clock, life).tolist() == expected
    assert str(reward) == f"score=1{scope}"


def test_a_term_without_scope_always_counts() -> None:
    reward = make_reward("score=1", KNOWN, RIVER)
    assert isinstance(reward, WeightedReward)
    assert reward.terms[0].scope is ALWAYS
