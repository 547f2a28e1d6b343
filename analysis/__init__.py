"""Draws figures from result rows, offline and reproducibly: `python -m analysis FIGURE`."""
