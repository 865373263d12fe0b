# Trainer: DeepSpeed engines for policy and critic. TORCH chooses the build of torch: the default is PyPI's (CUDA);
# TORCH=torch==2.13.0+cpu with TORCH_INDEX=https://download.pytorch.org/whl/cpu makes a CPU image.
#   docker build -f deploy/docker/trainer.Dockerfile -t sao/trainer .
# By digest: --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.11-slim-bookworm
FROM ${PYTHON}
WORKDIR /src
COPY requirements/trainer.lock requirements/trainer.lock
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
# TORCH carries the version; hadolint does not look into the argument.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} ${TORCH}
ENV DS_BUILD_OPS=0
# DeepSpeed is a source release whose set-up imports torch, so it is built in this environment and after all else.
RUN grep -vE "^(torch|deepspeed)==" requirements/trainer.lock > /tmp/rest.lock \
    && grep "^deepspeed==" requirements/trainer.lock > /tmp/deepspeed.lock \
    && pip install --no-cache-dir --no-deps -r /tmp/rest.lock \
    && pip install --no-cache-dir --no-deps --no-build-isolation --use-pep517 -r /tmp/deepspeed.lock
COPY pyproject.toml README.md LICENSE ./
COPY sao sao
COPY services services
RUN pip install --no-cache-dir --no-deps . && useradd --uid 10001 --create-home sao
# Elsewhere, so that `python -m` runs the installed, compiled package and not the sources beside it.
WORKDIR /home/sao
USER 10001
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
CMD ["python", "-m", "services.trainer", "--config", "/etc/sao/run.toml"]
