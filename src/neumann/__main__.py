"""`python -m neumann` runs the command `neumann`."""

from neumann.lab.commands.main import main

raise SystemExit(main())
