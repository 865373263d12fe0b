# Rollout worker: plays episodes against its SGLang engine and publishes trajectories.
#   docker build -f deploy/docker/rollout.Dockerfile -t sao/rollout .
# By digest: --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.11-slim-bookworm
FROM ${PYTHON}
WORKDIR /src
COPY requirements/light.lock requirements/light.lock
RUN pip install --no-cache-dir -r requirements/light.lock
COPY pyproject.toml README.md LICENSE ./
COPY sao sao
COPY services services
RUN pip install --no-cache-dir --no-deps . && useradd --uid 10001 --create-home sao
# Elsewhere, so that `python -m` runs the installed, compiled package and not the sources beside it.
WORKDIR /home/sao
USER 10001
ENV PYTHONUNBUFFERED=1
CMD ["python", "-m", "services.rollout", "--config", "/etc/sao/run.toml"]
