# Sourced, not run. Leaves a ready virtual environment in $project_dir/.venv and puts its commands first on PATH.
#
# The environment is made once and reused while pyproject.toml, constraints.txt and the interpreter stay the same: a stamp
# inside it holds their hash. PYTHON=/path/to/python chooses the interpreter that makes it.

project_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv_dir="$project_dir/.venv"

_say() { printf '%s\n' "$*" >&2; }

_find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python)
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    _say "gradsync needs Python 3.11 or later; found none among: ${candidates[*]}." \
        "Install one, or name it: PYTHON=/path/to/python3.11 $0"
    return 1
}

_make_venv() {
    local python
    python="$(_find_python)"
    _say "Making $venv_dir with $python"
    # A system Python may come without ensurepip (Debian splits it off); its own pip can then fill the environment.
    if ! "$python" -m venv --clear "$venv_dir" >/dev/null 2>&1; then
        "$python" -m venv --clear --without-pip "$venv_dir"
        "$python" -m pip --python "$venv_dir/bin/python" install -qq pip
    fi
}

_stamp() {
    "$venv_dir/bin/python" - "$project_dir" <<'PYTHON'
import hashlib, pathlib, sys
project = pathlib.Path(sys.argv[1])
parts = [(project / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"\0".join([*parts, sys.version.encode(), str(project).encode()])).hexdigest())
PYTHON
}

_fill_venv() {
    # -qq leaves errors visible; one -q would also print pip's warnings about where its files lie.
    local pip=("$venv_dir/bin/python" -m pip install -qq --disable-pip-version-check -c "$project_dir/constraints.txt")
    # torch first and alone, at the version held in constraints.txt: resolving the range of pyproject.toml could fetch a
    # newer build, gigabytes of CUDA with it, only to throw it away.
    _say "Installing torch (on a first run this takes some minutes)"
    "${pip[@]}" "$(grep -E '^torch==' "$project_dir/constraints.txt")"
    _say "Installing gradsync and its tools"
    "${pip[@]}" -e "$project_dir[dev]"
}

_prepare_venv() {
    "$venv_dir/bin/python" -m pip --version >/dev/null 2>&1 || _make_venv
    local stamp
    stamp="$(_stamp)"
    if [[ "$(cat "$venv_dir/.gradsync-stamp" 2>/dev/null)" != "$stamp" ]]; then
        _fill_venv
        printf '%s\n' "$stamp" >"$venv_dir/.gradsync-stamp"
    fi
}

# Two scripts started together must not fill one environment at once. Where there is no flock (macOS), they may.
if command -v flock >/dev/null; then
    exec 9>"$project_dir/.venv.lock"
    flock -w 1800 9 || { _say "Another script has held $project_dir/.venv.lock for 30 minutes: end it first."; exit 1; }
    _prepare_venv
    exec 9>&-
else
    _prepare_venv
fi
export VIRTUAL_ENV="$venv_dir" PATH="$venv_dir/bin:$PATH"
unset PYTHONHOME
unset PYTHONDONTWRITEBYTECODE # or each of some hundred processes that tests start would compile gradsync's source again
