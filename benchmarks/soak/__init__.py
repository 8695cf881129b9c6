"""Soak test: train small agents for hours with random faults, and check that nothing is lost and nothing leaks."""
