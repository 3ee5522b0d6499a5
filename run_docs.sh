#!/usr/bin/env bash
# Builds the documents as a site:  ./run_docs.sh [serve]
#
# build/docs/site/index.html opens without a server, except for its search; `serve` shows it on
# http://127.0.0.1:8000. The environment .venv-docs is made once. A run of 100 steps gives the site its report.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in
  "" | serve) ;;
  *) echo "error: $1: expected nothing or serve" >&2; exit 2 ;;
esac
source "$here/setup_env.sh"
setup_env requirements.txt
cd "$here"

venv="$here/.venv-docs"
if ! cmp -s requirements-docs.txt "$venv/installed"; then
  echo "setting up $venv from requirements-docs.txt ..." >&2
  "$PYTHON" -I -m venv --clear "$venv"
  "$venv/bin/python" -I -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
  cp requirements-docs.txt "$venv/installed"
fi

run="$here/build/docs/run"
report="$run/debug/report.html"
if [ ! -f "$report" ]; then
  rm -rf "$run"
  "$PYTHON" -m titanlite train debug --run.folder="$run" --training.steps=100 --metrics.log_freq=1 \
    --validation.freq=50 --checkpoint.freq=0
fi
"$venv/bin/python" docs/site/stage.py --report "$report"
cd build/docs
NO_MKDOCS_2_WARNING=true "$venv/bin/mkdocs" build --strict  # not --quiet: it would hide warnings from --strict
echo "built $here/build/docs/site/index.html"
if [ "${1:-}" = serve ]; then
  exec "$venv/bin/python" -m http.server --bind 127.0.0.1 --directory site 8000
fi
