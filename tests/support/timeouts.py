"""How long a test waits for another process before it fails."""

PROCESS_TIMEOUT = 240  # s; it normally takes a few, but machines that run tests are busy
