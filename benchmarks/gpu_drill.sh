#!/usr/bin/env bash
# Says in ten minutes on one GPU whether what this project claims of GPUs holds: ten parts, a table at the end.
#
#   benchmarks/gpu_drill.sh                           # on the first GPU
#   benchmarks/gpu_drill.sh --device cpu              # a rehearsal, two minutes on two idle cores
#   benchmarks/gpu_drill.sh --only graph bytes        # some parts, which share the time
#   benchmarks/gpu_drill.sh --only correctness --sets torch-triton
#
# Results: $OUT (default: drill), a JSON for each part, drill.log, here.toml. $DRILL_SECONDS is the limit of
# all parts together, which share it out (560, of a rehearsal 1800). $PYTHON (default: python3) is an interpreter that has PyTorch; what else is
# missing is installed into build/drill, from the wheels in build/wheels if there are any, else from the package index.
# Exit status: 0 if no part failed, 1 if one did, 2 if none can be run.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export OUT=${OUT:-$PWD/drill}
python=${PYTHON:-python3}
place=build/drill
wheels=build/wheels

mkdir -p "$OUT" || exit 2
: > "$OUT/drill.log"
say() { printf '%s\n' "$*" | tee -a "$OUT/drill.log"; }
stop() { say "$*"; exit 2; }

command -v "$python" > /dev/null || stop "'$python' is not found: PYTHON=/path/to/python3 names another"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || stop "'$python' is older than Python 3.11"
for folder in grammar ratrain_ir passes targets ratrainc; do # a copy of the tree may have no links
  [ -e "src/ratrain/$folder" ] || ln -s "../../$folder" "src/ratrain/$folder"
done

# An environment that sees all that $python does, itself in one or not, and can be added to.
own_environment() {
  local there pip=()
  "$python" -m pip --version > /dev/null 2>&1 && pip=(--without-pip) # its own is seen, and takes no time to install
  there=$("$python" -c 'import site; print(repr(site.getsitepackages()))')
  "$python" -m venv --clear --system-site-packages "${pip[@]}" "$place" || return 1
  python=$PWD/$place/bin/python
  "$python" -c 'import sys, sysconfig
with open(sysconfig.get_path("purelib") + "/there.pth", "w") as file:
    file.writelines(f"import site; site.addsitedir({each!r})\n" for each in eval(sys.argv[1]))' "$there"
}

install() {
  local from=(--retries 0 --timeout 5)
  [ -d "$wheels" ] && from=(--no-index --find-links "$wheels")
  "$python" -m pip install --quiet --disable-pip-version-check --no-input --prefer-binary "${from[@]}" "$@" 2>&1 |
    tail -n 1 | tee -a "$OUT/drill.log"
  return "${PIPESTATUS[0]}"
}

has_torch() { "$python" -c 'import torch' 2> /dev/null; }

if ! has_torch || [ -n "$("$python" benchmarks/gpu_drill.py --missing)" ]; then
  own_environment || stop "'$python' can make no environment (python3 -m venv)"
  has_torch || install torch || stop "PyTorch is not here and cannot be installed: PYTHON=/path/to/python3 names one that has it"
  "$python" benchmarks/gpu_drill.py --missing | while read -r wanted; do
    say "installing $wanted"
    install "$wanted" || say "$wanted is not to be had: going on with what is there"
  done
fi
PYTHONPATH=src "$python" -m ratrain --help > /dev/null 2> "$OUT/drill.err" ||
  stop "ratrain does not start: $(tail -n 1 "$OUT/drill.err")"
rm -f "$OUT/drill.err"
exec "$python" benchmarks/gpu_drill.py "$@"
