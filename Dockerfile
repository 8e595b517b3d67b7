# syntax=docker/dockerfile:1
# docker build -t hotswap:cpu .
# docker build -t hotswap:cuda --build-arg ACCEL=cuda .            # for NVIDIA GPUs, with TransformerEngine
# docker build -t hotswap:full --build-arg EXTRAS=extras-cpu .     # RDMA, followed runs: see requirements/
# docker run --shm-size 4g -v /models:/models:ro -p 8000:8000 hotswap:cpu up --model /models/NAME --host 0.0.0.0
# Versions live in /dev/shm: give it three times the size of the model. On Kubernetes: k8s/README.md.
ARG ACCEL=cpu

# libibverbs1 is what NIXL reaches RDMA devices through; its providers drive the devices of a host. In
# bubblewrap rewards run a model's code, where the container may make namespaces (docs/trainer/rewards.md). tini is
# process number one: it takes away what dead processes leave, which nobody else does in a container.
FROM python:3.11-slim-bookworm AS python-cpu
FROM python:3.12-slim-bookworm AS python-cuda

FROM python-${ACCEL} AS runtime-cpu
RUN apt-get update \
 && apt-get install -y --no-install-recommends libnuma1 libstdc++6 libgomp1 libibverbs1 ibverbs-providers \
    bubblewrap tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home hotswap
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# Kernels are compiled at run time, so this one carries a compiler; the driver comes from the host.
FROM runtime-cpu AS runtime-cuda
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*

# The compiler of the gateway's request path (server/gateway/compiled.py) stays here; only /opt/venv goes on.
# The pinned list is resolved as a whole, so nothing is added to it (see its first lines), but for kernels of FlashInfer's
# release, compiled, of its own index: the image has no CUDA toolkit to compile them at a request.
FROM runtime-cpu AS build-cpu
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

# TransformerEngine's part for torch comes as sources. CUDA's headers are those of the list's own packages.
FROM runtime-cuda AS build-cuda
ENV CUDA_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cu13 \
    NVTE_BUILD_USE_NVIDIA_WHEELS=1

FROM build-${ACCEL} AS build
ARG ACCEL
ARG EXTRAS=
COPY requirements /src/requirements
COPY scripts/install.sh /src/scripts/install.sh
WORKDIR /src
RUN --mount=type=cache,target=/root/.cache \
    scripts/install.sh /opt/venv requirements/${ACCEL}.txt $(ls requirements/fp8-${ACCEL}.txt 2>/dev/null) \
    ${EXTRAS:+requirements/${EXTRAS}.txt} \
 && if [ "$ACCEL" = cuda ]; then /opt/venv/bin/python -m flashinfer download-kernels; fi \
 && grep -E '^(mypy|ast-serialize|librt|pathspec|types-)' requirements/test.txt > /mypy.txt \
 && /opt/venv/bin/pip install --no-deps --target /opt/mypy -r /mypy.txt \
 && /opt/venv/bin/pip uninstall -y uv
COPY pyproject.toml README.md LICENSE /src/
COPY client /src/client
COPY server /src/server
COPY trainer /src/trainer
COPY weightsync /src/weightsync
RUN PYTHONPATH=/opt/mypy python -m server.gateway.compiled \
 && pip install --no-deps --no-build-isolation /src/client /src

FROM runtime-${ACCEL} AS hotswap
COPY --from=build /opt/venv /opt/venv
USER 10001:10001
WORKDIR /home/hotswap
EXPOSE 8000
ENTRYPOINT ["tini", "--", "hotswap"]
CMD ["--help"]
