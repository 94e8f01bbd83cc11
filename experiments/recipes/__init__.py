"""Recipes that ship with the package: `dpray run NAME`."""
