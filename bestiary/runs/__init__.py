"""Run folders: what a training leaves behind, and all that any later command needs."""
