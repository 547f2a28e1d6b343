"""Draws figures and a report from result rows: `python -m analysis FIGURE`; offline,
reproducible."""
