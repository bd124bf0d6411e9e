# Images of kvrecall: gateway (no torch), worker (CPU), worker-cuda (NVIDIA).
#   docker build --target gateway -t kvrecall-gateway .
# All run as 10001:10001 on a read-only root; /tmp and /var/lib/kvrecall must be writable. A gateway
# needs KVRECALL_API_KEY or keys, a worker KVRECALL_SERVER__TOKEN or TLS: both listen on all addresses.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
RUN groupadd --gid 10001 kvrecall \
 && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin kvrecall \
 && install --directory --owner 10001 --group 10001 \
      /var/lib/kvrecall /var/lib/kvrecall/huggingface
ENV PATH=/opt/kvrecall/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/var/lib/kvrecall/huggingface \
    KVRECALL_CACHE=/var/lib/kvrecall/cache \
    KVRECALL_DATA=/var/lib/kvrecall \
    KVRECALL_LOG=json
WORKDIR /var/lib/kvrecall
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvrecall"]

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/kvrecall
# Requirements first: a change of the code alone builds one layer.
COPY pyproject.toml constraints.txt deploy/requirements.py ./
COPY kvrecall/pyproject.toml kvrecall/

FROM build AS build-gateway
RUN python3 requirements.py gateway otel > requirements.txt \
 && /opt/kvrecall/bin/pip install --quiet -c constraints.txt -r requirements.txt
COPY . .
RUN /opt/kvrecall/bin/pip install --quiet --no-deps ./kvrecall .

# A worker's native code; a gateway has none, and its build goes on without a compiler.
FROM build AS build-native
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

# PyPI's torch for Linux is the CUDA build, some 5 GB with its libraries: the CPU build has an index of its own.
FROM build-native AS build-worker
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 requirements.py torch > torch.txt \
 && /opt/kvrecall/bin/pip install --quiet -c constraints.txt --index-url "${TORCH_INDEX}" -r torch.txt
RUN python3 requirements.py worker otel s3 > requirements.txt \
 && /opt/kvrecall/bin/pip install --quiet -c constraints.txt -r requirements.txt
COPY . .
RUN /opt/kvrecall/bin/pip install --quiet --no-deps ./kvrecall .

FROM build-native AS build-worker-cuda
RUN python3 requirements.py worker otel s3 > requirements.txt \
 && /opt/kvrecall/bin/pip install --quiet -c constraints.txt -r requirements.txt
COPY . .
RUN /opt/kvrecall/bin/pip install --quiet --no-deps ./kvrecall .

FROM base AS gateway
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvrecall gateway" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build-gateway /opt/kvrecall /opt/kvrecall
ENV KVRECALL_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8420
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8420/healthz', timeout=4)"]
CMD ["gateway"]

FROM base AS worker-base
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvrecall worker" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Large pages for malloc's memory, rows and weights: docs/operations.md#large-pages.
ENV KVRECALL_SERVER__LISTEN=0.0.0.0:8421 \
    KVRECALL_SERVER__OPS_LISTEN=0.0.0.0:9421 \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1
EXPOSE 8421 9421
# Of the port for operators, which answers while the model is loaded; it speaks no TLS.
HEALTHCHECK --interval=10s --timeout=5s --start-period=1200s --retries=3 \
  CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9421/healthz', timeout=4)"]
CMD ["worker"]

FROM worker-base AS worker
COPY --from=build-worker /opt/kvrecall /opt/kvrecall
USER 10001:10001

FROM worker-base AS worker-cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-worker-cuda /opt/kvrecall /opt/kvrecall
USER 10001:10001
