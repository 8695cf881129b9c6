"""Configuration of a run: options, presets, TOML files and their validation."""
