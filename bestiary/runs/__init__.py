"""Run folders (configuration, checkpoints, CSV files, loggers, recordings) and the agents of the package (zoo)."""
