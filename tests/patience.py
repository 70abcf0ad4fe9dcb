"""How long a test waits for another process before it calls that a failure."""

PATIENCE = 240  # s, for what takes a few: machines that run tests are busy
