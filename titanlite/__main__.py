"""`python -m titanlite` is the command `titanlite`. run_train.sh starts this file by its path."""

import sys

from titanlite.runtime.interpreter import leave_out_current_folder

if __name__ == "__main__":
    leave_out_current_folder()  # before anything else is imported
    from titanlite.tools.cli.main import main

    sys.exit(main(sys.argv[1:]))
