"""Puts this folder on the path: the scripts import `common` and `habits` from it."""
