"""Panels of curves, declared once for plot.png and report.html."""
