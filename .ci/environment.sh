# Functions and settings of all checks. Source this file in the project's root, with `uv` on the path.
# shellcheck shell=bash

# No command may wait for input, and no package of the caller may replace one that is installed here.
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

# install_into ENVIRONMENT REQUIREMENT...: install packages, and the shim for torchvision.
install_into() {
    local environment=$1 packages
    shift
    # Compiled once here, not by every process of the tests: torch and timm take seconds.
    uv pip install --quiet --compile-bytecode --python "$environment" "$@"
    # If the machine names CPU-only wheels, the checks must test those.
    if [ -n "$find_links" ] && uv pip list --quiet --python "$environment" | grep -E '^nvidia-'; then
        echo "$environment holds the libraries of a CUDA build of torch" >&2
        return 1
    fi
    # The shim lets a CUDA build of torchvision be imported with a CPU-only torch.
    packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp .ci/torchvision_shim.py "$packages"
    echo 'import torchvision_shim' >"$packages/torchvision_shim.pth"
}

# new_environment ENVIRONMENT PYTHON
new_environment() { uv venv --quiet --clear --python "$2" "$1"; }
