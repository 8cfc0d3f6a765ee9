"""Stretto: an elastic scheduler and an elastic training runtime for deep learning."""

__version__ = "0.1.0"
