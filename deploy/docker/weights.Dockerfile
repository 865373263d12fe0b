# Weight-sync service: brings every engine to the newest verified version.
#   docker build -f deploy/docker/weights.Dockerfile -t sao/weights .
# By digest: --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.11-slim-bookworm
FROM ${PYTHON}
WORKDIR /src
COPY requirements/weights.lock requirements/weights.lock
RUN pip install --no-cache-dir -r requirements/weights.lock
COPY pyproject.toml README.md LICENSE ./
COPY sao sao
COPY services services
RUN pip install --no-cache-dir --no-deps . && useradd --uid 10001 --create-home sao
# Elsewhere, so that `python -m` runs the installed, compiled package and not the sources beside it.
WORKDIR /home/sao
USER 10001
ENV PYTHONUNBUFFERED=1
CMD ["python", "-m", "services.weights", "--config", "/etc/sao/run.toml"]
