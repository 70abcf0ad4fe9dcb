"""Other processes: how long a test waits for one before it fails, and whether one still runs."""

from pathlib import Path

PROCESS_TIMEOUT = 240  # s; it normally takes a few, but machines that run tests are busy


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
