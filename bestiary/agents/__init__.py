"""Agents: what acts."""
