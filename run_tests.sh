#!/usr/bin/env bash
# Tests:  ./run_tests.sh [--torch VERSION] [pytest arguments]
# Without pytest arguments two tests run at a time: many wait for processes or time-outs.
# --torch 2.15.0 tests with that release, in an environment of its own, .venv-torch-2.15.0.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/setup_env.sh"
if [ "${1:-}" = --torch ]; then
  if (($# < 2)); then echo "error: --torch: expected a release, for example --torch 2.15.0" >&2; exit 2; fi
  setup_torch "$2"
  shift 2
fi
setup_env requirements-dev.txt
unset PYTHONDONTWRITEBYTECODE  # with it, each process that a test starts compiles titanlite again
cd "$here"
(($#)) || set -- -n 2 --dist worksteal
exec "$PYTHON" -m pytest "$@"
