#!/usr/bin/env bash
# Lint, format, imports between rooms, and types:  ./run_lint.sh     (what .ci/run, the GitHub workflow and pre-commit call)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/setup_env.sh"
setup_env requirements-dev.txt
cd "$here"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# The contracts of pyproject.toml
"$PYTHON" -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-cache --no-logo
"$PYTHON" -m mypy
