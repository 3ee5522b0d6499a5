"""`python -m titanlite` is the command `titanlite`."""

import sys

from titanlite.cli import main

sys.exit(main())
