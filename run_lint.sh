#!/usr/bin/env bash
# Lint, format and types:  ./run_lint.sh     (what .ci/run, the GitHub workflow and pre-commit call)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/setup_env.sh"
setup_env requirements-dev.txt
cd "$here"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
