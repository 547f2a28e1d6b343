"""Figures and a report from result rows: `python -m analysis FIGURE`, offline and reproducible."""
