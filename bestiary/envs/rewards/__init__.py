"""Rewards that the user defines: their parser, their computation, and the wrapper that applies them to environments."""
