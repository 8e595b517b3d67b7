# syntax=docker/dockerfile:1
# docker build --target cpu  -t hotswap:cpu  .
# docker build --target cuda -t hotswap:cuda .
# docker run --shm-size 4g -v /models:/models:ro -p 8000:8000 hotswap:cpu up --model /models/NAME --host 0.0.0.0
# Versions live in /dev/shm: give it three times the size of the model.

FROM python:3.11-slim-bookworm AS runtime
RUN apt-get update \
 && apt-get install -y --no-install-recommends libnuma1 libstdc++6 libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home hotswap
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# Compiles the gateway's request path (server/gateway/compiled.py); none of this is in the final images.
FROM runtime AS compiler
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/dev.txt /src/requirements/
RUN grep -E '^(mypy|ast-serialize|librt|pathspec|types-)' /src/requirements/dev.txt > /mypy.txt \
 && pip install --no-deps --target /opt/mypy -r /mypy.txt

# The pinned list is resolved as a whole, so nothing is added to it (see its first lines).
FROM compiler AS build-cpu
RUN python -m venv /opt/venv
COPY requirements/cpu.txt /src/requirements/
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps -r /src/requirements/cpu.txt
COPY pyproject.toml README.md LICENSE /src/
COPY server /src/server
COPY trainer /src/trainer
COPY weightsync /src/weightsync
COPY loadtest /src/loadtest
WORKDIR /src
ENV PYTHONPATH=/opt/mypy
RUN python -m server.gateway.compiled && pip install --no-deps --no-build-isolation /src

FROM compiler AS build-cuda
RUN python -m venv /opt/venv
COPY requirements/cuda.txt /src/requirements/
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps -r /src/requirements/cuda.txt
COPY pyproject.toml README.md LICENSE /src/
COPY server /src/server
COPY trainer /src/trainer
COPY weightsync /src/weightsync
COPY loadtest /src/loadtest
WORKDIR /src
ENV PYTHONPATH=/opt/mypy
RUN python -m server.gateway.compiled && pip install --no-deps --no-build-isolation /src

# Kernels are compiled at run time, so this one carries a compiler; the driver comes from the host.
FROM runtime AS cuda
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/venv /opt/venv
USER 10001:10001
WORKDIR /home/hotswap
EXPOSE 8000
ENTRYPOINT ["hotswap"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
USER 10001:10001
WORKDIR /home/hotswap
EXPOSE 8000
ENTRYPOINT ["hotswap"]
CMD ["--help"]
