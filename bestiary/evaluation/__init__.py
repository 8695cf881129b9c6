"""Evaluation of trained agents: playing whole games, statistics, learning curves, videos, export of rollouts."""
