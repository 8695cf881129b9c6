"""Run folders: configuration, checkpoints, CSV files, loggers and recordings; agents that come with the package."""
