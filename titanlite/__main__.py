"""`python -m titanlite` is the command `titanlite`."""

import sys

from titanlite.cli.main import main

sys.exit(main())
