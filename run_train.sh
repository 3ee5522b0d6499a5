#!/usr/bin/env bash
# Trains:  ./run_train.sh [CONFIG] [--section.key=value ...]     (--help lists every key)
# NGPU is the number of processes on this node (default: CUDA devices, or 1). docs/running.md has the other variables.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/setup_env.sh"
setup_env requirements.txt
exec "$PYTHON" "$here/titanlite/__main__.py" train "$@"  # -m would put the current folder first in sys.path
