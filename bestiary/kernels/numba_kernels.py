"""Numba implementation of the delta rule and of the self-referential weight matrix, for CPUs."""

from bestiary.kernels.numba_delta import delta_seq
from bestiary.kernels.numba_srwm import srwm_seq

__all__ = ["delta_seq", "srwm_seq"]
