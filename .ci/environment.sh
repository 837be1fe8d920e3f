# What the checks share; sourced in the project's root, where `uv` is on the path.
# shellcheck shell=bash

# Nothing may wait for an answer, and nothing of the caller's may be tested in place of what is installed here.
exec </dev/null
unset PYTHONPATH VIRTUAL_ENV

# uv does not read pip's configuration, where a machine may name the folder of its CPU-only torch wheel.
find_links=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
if [ -n "$find_links" ]; then
    UV_FIND_LINKS=$(echo $find_links | tr ' ' ',') # unquoted: pip separates by any white space, uv by commas
    export UV_FIND_LINKS
fi
export UV_CONSTRAINT="$PWD/.ci/constraints.txt"

step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

# install_into ENVIRONMENT REQUIREMENT...: also what torchvision needs there.
install_into() {
    local environment=$1 packages
    shift
    uv pip install --quiet --python "$environment" "$@"
    # Where a machine names its CPU-only wheels, they are what is tested.
    if [ -n "$find_links" ] && uv pip list --quiet --python "$environment" | grep -E '^nvidia-'; then
        echo "$environment holds the libraries of a CUDA build of torch" >&2
        return 1
    fi
    # A CUDA build of torchvision beside a CPU-only torch cannot be imported as it is; the file says why.
    packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp .ci/torchvision_shim.py "$packages"
    echo 'import torchvision_shim' >"$packages/torchvision_shim.pth"
}

# new_environment ENVIRONMENT PYTHON
new_environment() { uv venv --quiet --clear --python "$2" "$1"; }
