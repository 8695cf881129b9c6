"""Translation of command lines of other projects, such as TorchBeast, and import of their checkpoints."""
