# For NVIDIA GPUs: docker build --tag batchinf:cuda .
#   docker run --gpus all --shm-size 16g --volume "$PWD:/work" batchinf:cuda run job.yaml
# CUDA itself is among the wheels; the host has the driver (docs/install.md says which).
FROM python:3.11-slim-bookworm

# vLLM and Triton compile kernels when an engine starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/batchinf
COPY requirements-cuda.lock ./
RUN python -m pip install --no-cache-dir --no-deps --requirement requirements-cuda.lock
COPY pyproject.toml README.md LICENSE ./
COPY batchinf batchinf
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation .

ENV VLLM_NO_USAGE_STATS=1
WORKDIR /work
ENTRYPOINT ["batchinf"]
