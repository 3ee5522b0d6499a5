# Sourced by run_train.sh, run_tests.sh and run_lint.sh: finds or makes the Python environment and sets PYTHON.
#
# The active environment is used if Python >= 3.10, torch >= 2.11 and the other packages are installed in it.
# Otherwise .venv beside this file is: what a requirements file pins is installed into it once. If it is
# missing or broken it is made anew.

# usable PYTHON REQUIREMENTS: does this interpreter have what the requirements file names?
usable() {
  "$1" - "$2" 2>/dev/null <<'PY'
import sys
sys.path[:] = filter(None, sys.path)  # not from the current folder
import importlib.metadata, re
assert sys.version_info >= (3, 10)
lines = open(sys.argv[1]).read().splitlines()
if "-r requirements.txt" in lines:
    lines += open(sys.argv[1].replace("-dev", "")).read().splitlines()
names = {line.split("=")[0] for line in lines if "==" in line}
if sys.version_info >= (3, 11):
    names.discard("tomli")
versions = {name: importlib.metadata.version(name) for name in names}
assert tuple(int(n) for n in re.findall(r"\d+", versions["torch"])[:2]) >= (2, 11)
PY
}

# recent PYTHON: is it Python >= 3.10?
recent() {
  "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# has_pip PYTHON: is it Python >= 3.10 with a pip that can be imported?
has_pip() {
  recent "$1" && "$1" -I -c 'import pip' 2>/dev/null
}

# setup_env REQUIREMENTS: sets PYTHON, making .venv if need be.
setup_env() {
  local here name python=""
  here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
  local requirements="$here/$1" venv="$here/.venv"
  local stamp="$venv/installed-$1"
  # Without empty entries, which would stand for the current folder
  export PYTHONPATH="$(printf %s "$here:${PYTHONPATH:-}" | tr -s :)"
  PYTHONPATH="${PYTHONPATH%:}"
  for name in python3 python; do
    if usable "$name" "$requirements"; then PYTHON="$(command -v "$name")"; return; fi
  done
  PYTHON="$venv/bin/python"
  if [ -x "$PYTHON" ] && cmp -s "$requirements" "$stamp" && usable "$PYTHON" "$requirements"; then return; fi
  # An environment that works keeps its interpreter: a second one over it would break its pip
  if ! has_pip "$PYTHON"; then
    for name in python3 python python3.13 python3.12 python3.11 python3.10; do
      if recent "$name"; then python="$name"; break; fi
    done
    if [ -z "$python" ]; then
      echo "error: no Python >= 3.10 found; install one (https://www.python.org/downloads)" >&2; return 2
    fi
    echo "setting up $venv from $1 (once; torch is large, this can take minutes) ..." >&2
    if ! "$python" -I -m venv --clear "$venv" >&2; then  # -I: not from the current folder
      echo "error: $python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; return 2
    fi
  else
    echo "installing $1 into $venv ..." >&2
  fi
  if ! "$PYTHON" -I -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2; then
    echo "error: pip could not install $1 into $venv; its message is above" >&2; return 2
  fi
  cp "$requirements" "$stamp"
  cp "$here/requirements.txt" "$venv/installed-requirements.txt"
  echo "environment ready: $venv" >&2
}

# setup_torch VERSION: makes .venv-torch-VERSION with this release in place of the pinned one, and activates it.
setup_torch() {
  local here
  here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
  local venv="$here/.venv-torch-$1"
  if [ ! -e "$venv/installed" ]; then
    echo "setting up $venv with torch $1 (once; this can take minutes) ..." >&2
    if ! python3 -I -m venv --clear "$venv" >&2; then
      echo "error: python3 cannot make a virtual environment" >&2; return 2
    fi
    sed "s/^torch==.*/torch==$1/" "$here/requirements.txt" > "$venv/requirements.txt"
    cp "$here/requirements-dev.txt" "$venv"
    if ! "$venv/bin/python" -I -m pip install --quiet --disable-pip-version-check -r "$venv/requirements-dev.txt" >&2; then
      echo "error: pip could not install torch $1 into $venv; its message is above" >&2; return 2
    fi
    touch "$venv/installed"
  fi
  export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
}
