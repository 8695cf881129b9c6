"""Parser of reward specifications, the values of `--reward` and `--true-reward`.

    --reward fuel:10                       a named reward and its strength
    --reward pacifist:20:10                a named reward, its strength and its base
    --reward collected=1,expired=-0.5      reward components and their weights
    --reward pacifist:20,fire=-1           a sum of items; an item is a named reward or a component
    --reward score=1@life=1@max=100        an item with scopes: it counts only in the first life, at most 100 per step
    --reward my_reward.py:careful          a function in a user's file: {name: measure [N]} -> rewards [N]

A scope restricts when an item counts. With `@steps=A:B`, it counts only in steps A to B-1 of a game; with `@life=K`,
only in the K-th life; with `@every=K`, only in each K-th step of a game. `@max=X` clips the component to [-X,X] before
it is multiplied by its weight.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bestiary.envs.rewards.components import RewardComponent, resolve_alias
from bestiary.envs.rewards.named_rewards import NAMED_REWARDS, available_named_rewards
from bestiary.envs.rewards.reward_functions import ALWAYS, CustomReward, Reward, Scope, Term, WeightedReward
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.options import convert, suggest
from bestiary.utils.plugin_names import PluginRef, parse_name

MAX_WEIGHT = 1e30  # leaves room for large components: weight x component must stay below the largest float32, 3e38
SCOPE_EXAMPLES = {"steps": "@steps=0:500", "life": "@life=1", "every": "@every=4", "max": "@max=100"}


def make_reward(text: str | None, available: Mapping[str, RewardComponent], env: str, flag: str = "--reward") -> Reward:
    """Return the reward function of a specification. If `text` is None, return the environment's own reward.

    `available` are the reward components of the environment `env`. If the specification is invalid, raise UserError
    with all of its problems; the messages start with the command-line option `flag`.
    """
    if text is None:
        return WeightedReward((Term("reward", 1.0),))
    text = parse_name(text)
    if isinstance(text, PluginRef):
        return CustomReward(text, plugins.load(text, "reward"))
    problems: list[str] = []
    items: list[_Item] = []
    for part in text.split(","):
        try:
            item = _parse_item(part, available, env)
            for other in items:
                _check_conflict(other, item, available)
            items.append(item)
        except ValueError as error:
            problems.append(f"{flag} {text}: {error}")
    if problems:
        raise UserError(*problems)
    weights: dict[tuple[str, Scope], float] = {}
    named_first = sorted(items, key=lambda item: item.is_component)
    for term in (term for item in named_first for term in item.terms):
        key = (term.component, term.scope)
        weights[key] = weights.get(key, 0.0) + term.weight
    return WeightedReward(tuple(Term(component, weight, scope) for (component, scope), weight in weights.items()))


@dataclass(frozen=True)
class _Item:
    """One comma-separated item of a specification: a named reward (`fuel:10@life=1`) or a component (`alive=1`)."""

    text: str
    name: str
    scope: Scope
    terms: tuple[Term, ...]
    is_component: bool


def _check_conflict(first: _Item, second: _Item, available: Mapping[str, RewardComponent]) -> None:
    """Raise ValueError if two items of a specification count the same component in the same steps.

    Such a specification is probably a mistake.
    """
    same_kind = first.is_component == second.is_component
    if same_kind and first.scope == second.scope and first.name == second.name:
        raise ValueError(f"{first.name} occurs twice; remove one of the two items, or give them different scopes")
    if first.scope.is_disjoint(second.scope):
        return

    def components(item: _Item) -> dict[str, Term]:
        return {resolve_alias(term.component, available): term for term in item.terms}

    shared = components(first).keys() & components(second).keys()
    if first.is_component and second.is_component:
        if shared and first.scope == second.scope:
            raise ValueError(f"{first.name} and {second.name} are the same component in this environment; remove one")
    elif first.is_component or second.is_component:
        named, single = (second, first) if first.is_component else (first, second)
        for name in shared:
            raise ValueError(
                f"{named.name} and {single.name}=... contradict each other: {named.name} already contains "
                f"{components(named)[name]}; remove one"
            )
    elif shared - {"alive"}:  # two named rewards may both contain `alive`: their bases are added
        name = next(iter(shared - {"alive"}))
        alternatives = [
            _without_shared(first, components(second), shared),
            _without_shared(second, components(first), shared),
        ]
        advice = next((f"write {text}" for text in alternatives if text), "remove one")
        raise ValueError(f"{first.name} and {second.name} both contain {name}, which would count twice: {advice}")


def _without_shared(item: _Item, other: Mapping[str, Term], shared: set[str]) -> str:
    """Return a specification for an error message, which suggests it to replace `item` and another item.

    It consists of `item` and the terms of the other item without the components in `shared`. `other` maps each
    component of the other item to its term. Return an empty text if no such term exists.
    """
    rest = [str(term) for name, term in other.items() if name not in shared]
    return ",".join([item.text, *rest]) if rest else ""


def _parse_item(text: str, available: Mapping[str, RewardComponent], env: str) -> _Item:
    body, *scopes = (part.strip() for part in text.split("@"))
    scope = _parse_scope(scopes)
    if "=" in body:
        return _parse_component(text.strip(), body, scope, available, env)
    return _parse_named_reward(text.strip(), body, scope, available, env)


def _parse_component(text: str, body: str, scope: Scope, available: Mapping[str, RewardComponent], env: str) -> _Item:
    """Return the item for `body` = `name=weight`. `text` is the whole item, including its scopes."""
    name, _, weight = (part.strip() for part in body.partition("="))
    if name not in available:
        hint = f" (a named reward is written {name}:STRENGTH)" if name in NAMED_REWARDS else ""
        raise ValueError(
            f"{env} has no component {name}{suggest(name, available)}; it has {', '.join(available)}{hint}"
        )
    term = Term(name, _parse_number(weight, f"the weight of {name}"), scope)
    return _Item(text, name, scope, (term,), is_component=True)


def _parse_named_reward(
    text: str, body: str, scope: Scope, available: Mapping[str, RewardComponent], env: str
) -> _Item:
    """Return the item for `body` = `name:strength` or `name:strength:base`. `text` also contains the scopes."""
    name, *numbers = (part.strip() for part in body.split(":"))
    if name not in NAMED_REWARDS:
        known = [*available_named_rewards(available), *available]
        hint = f" (a component is written {name}=WEIGHT)" if name in available else suggest(name, known)
        raise ValueError(f"unknown reward {name or body!r}{hint}; {env} has {', '.join(known)}")
    reward = NAMED_REWARDS[name]
    if name not in available_named_rewards(available):
        needed = " and ".join(reward.weights(1, 1))
        raise ValueError(f"{name} needs the components {needed}, but {env} does not have all of them")
    if not numbers:
        raise ValueError(f"{name} needs a strength, for example {name}:10")
    if len(numbers) > (1 if reward.base is None else 2):
        form = f"{name}:STRENGTH{'' if reward.base is None else ':BASE'}"
        raise ValueError(f"{name} has {len(numbers)} numbers, which is too many; write {form}")
    strength = _parse_number(numbers[0], f"the strength of {name}")
    base = _parse_number(numbers[1], f"the base of {name}") if len(numbers) > 1 else reward.base or 0.0
    if reward.penalises and strength < 0:
        raise ValueError(
            f"{name}:{numbers[0]} would reward {reward.penalises}, which {name} penalises; write "
            f"{name}:{numbers[0].lstrip('-')} (to reward {reward.penalises}, write {reward.penalises}=WEIGHT)"
        )
    term_scope = scope
    if reward.is_limit:
        if strength <= 0:
            raise ValueError(f"{name}:{numbers[0]}: the limit must be above 0")
        term_scope = replace(scope, limit=min(scope.limit, strength))
    weights = reward.weights(strength, base)
    terms = tuple(Term(component, weight, term_scope) for component, weight in weights.items())
    return _Item(text, name, scope, terms, is_component=False)


def _parse_number(text: str, what: str) -> float:
    try:
        number = float(convert(text, float))
    except ValueError:
        raise ValueError(f"{what} is {text!r}, which is not a number") from None
    if abs(number) > MAX_WEIGHT:
        limits = f"from {-MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise ValueError(f"{what} is {text}, but it must be {limits}, because rewards are float32")
    return number


def _parse_scope(words: list[str]) -> Scope:
    scope = ALWAYS
    for word in words:
        name, _, value = (part.strip() for part in word.partition("="))
        try:
            scope = _add_scope(scope, name, value)
        except ValueError:
            expected = SCOPE_EXAMPLES.get(name, ", ".join(SCOPE_EXAMPLES.values()))
            raise ValueError(f"@{word} is not a scope; expected for example {expected}") from None
    return scope


def _add_scope(scope: Scope, name: str, value: str) -> Scope:
    """Return the scope with one more restriction, such as life=1. Raise ValueError if the restriction is invalid."""
    if name == "steps":
        first_text, colon, last_text = value.partition(":")
        first = int(convert(first_text or "0", int))
        last = float(convert(last_text, int)) if last_text else math.inf
        if colon and 0 <= first < last:
            return replace(scope, first=first, last=last)
    elif name in ("life", "every"):
        count = int(convert(value, int))
        if count >= 1:
            return replace(scope, life=count) if name == "life" else replace(scope, every=count)
    elif name == "max":
        limit = float(convert(value, float))
        if limit > 0:
            return replace(scope, limit=limit)
    raise ValueError
