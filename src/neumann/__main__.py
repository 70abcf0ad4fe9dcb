"""`python -m neumann` runs the command `neumann`."""

import sys

# Python puts the working folder first. A run's folder from someone else could hold a timm.py, which
# we would then import instead of timm. Code that the user names is still found there.
if not sys.flags.safe_path:
    del sys.path[0]

from neumann.lab.commands.main import main

raise SystemExit(main())
