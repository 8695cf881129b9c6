"""Command `audit`: compare the training return with the true return of trained agents."""

from pathlib import Path

from bestiary.cli.arguments import (
    Parser,
    add_game_limits,
    add_greedy,
    add_overwrite,
    add_run_argument,
    add_seed,
)
from bestiary.runs.run import open_run
from bestiary.utils import trust
from bestiary.utils.plugin_names import split_rewards


def audit_command(argv: list[str]) -> None:
    """Play games with the agents of runs, and compare their training return with their true return."""
    parser = Parser(
        "audit",
        "Play games with trained agents and compare their training return with their true return (the return of a "
        "reward that is only logged). Figures show both returns for different network sizes and numbers of training "
        "steps. With --trusted, also measure the distance between the policy of each run and the policy of a trusted "
        "run. Tables and figures are written to a folder.",
    )
    add_run_argument(parser, several=True)
    parser.add_argument(
        "--trusted", metavar="RUN", help="reference run; the policies of all other runs are compared with its policy"
    )
    parser.add_argument(
        "--true-reward",
        metavar="REWARD",
        help="true reward to use for all runs (default: each run uses the true reward of its own configuration)",
    )
    parser.add_argument(
        "--checkpoints", choices=("all",), metavar="all", help="audit all checkpoints of each run, not only the newest"
    )
    parser.add_integer("--episodes", "number of games that are played with each checkpoint", default=20, low=1)
    add_game_limits(parser, num_envs=10)
    add_greedy(parser)
    add_seed(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", default="audit", help="output folder of the tables and figures (default: audit)"
    )
    add_overwrite(parser)
    a = parser.parse_strictly(argv)

    from bestiary.reward_audit.audit import audit

    audit(
        [open_run(word, a.trust_code) for word in a.run],
        Path(a.out),
        trusted=open_run(a.trusted, a.trust_code) if a.trusted else None,
        true_reward="; ".join(map(trust.named_by_user, split_rewards(a.true_reward))) if a.true_reward else None,
        every_checkpoint=a.checkpoints == "all",
        episodes=a.episodes,
        greedy=a.greedy,
        seed=a.seed,
        num_envs=a.num_envs,
        max_steps=a.max_steps,
        overwrite=a.overwrite,
    )
