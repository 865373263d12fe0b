# A real SGLang server on CPU, for machines without a GPU (on GPU nodes use SGLang's own image, lmsysorg/sglang).
# TORCH_INDEX: an index that has CPU builds of torch; the default is PyTorch's own.
#   docker build -f deploy/docker/engine-cpu.Dockerfile -t sao/engine-cpu .
# By digest: --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.11-slim-bookworm
FROM ${PYTHON}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch==2.13.0+cpu
COPY engine engine
RUN pip install --no-cache-dir --no-deps -r engine/requirements.lock \
    && pip install --no-cache-dir --no-deps ./engine \
    && useradd --uid 10001 --create-home sao
WORKDIR /home/sao
USER 10001
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
CMD ["python", "-m", "sglang_cpuref.serve", "--model", "/data/initial", "--host", "0.0.0.0", "--port", "30000"]
