"""`python -m neumann`: the same as the command `neumann`."""

from neumann.cli import main

raise SystemExit(main())
