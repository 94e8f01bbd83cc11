"""Reproductions of the papers the package implements, one folder a paper."""
