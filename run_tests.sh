#!/usr/bin/env bash
# Tests:  ./run_tests.sh [pytest arguments]
# Without arguments two tests run at a time: many wait for processes or time-outs.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/setup_env.sh"
setup_env requirements-dev.txt
cd "$here"
(($#)) || set -- -n 2 --dist worksteal
exec "$PYTHON" -m pytest "$@"
