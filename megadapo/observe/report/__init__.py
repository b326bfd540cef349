"""`megadapo report`: runs as one HTML file that needs no network and trusts no model output.

Python reads and bounds what is shown; the files of `assets/` draw it in the browser.
"""

from megadapo.observe.report.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
