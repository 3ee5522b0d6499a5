#!/usr/bin/env bash
# Tests:  ./run_tests.sh [pytest arguments]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/setup_env.sh"
setup_env requirements-dev.txt
cd "$here"
exec "$PYTHON" -m pytest "$@"
