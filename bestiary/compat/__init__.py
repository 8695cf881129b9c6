"""Command lines of the original projects: their flags, and the Bestiary commands that do the same."""
