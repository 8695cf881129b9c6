"""Lenses: everything here reads run folders and never reaches into a running trainer."""
