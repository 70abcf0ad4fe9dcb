"""Pictures and pages from the lab's records: `write_report(folder)`, `write_density(record)`.

Reads what is on disk, finished or not, and trains nothing. Needs the extra `lab`.
"""

from neumann.report.density import write_density
from neumann.report.writing import write_report

__all__ = ["write_density", "write_report"]
