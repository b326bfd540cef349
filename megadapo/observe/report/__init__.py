"""The report: Python reads and bounds what is shown; `assets/` draws it in the browser."""
