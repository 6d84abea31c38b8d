# The command `walstream` in an image. An application builds its own on top: FROM this one, add the package with the
# stream, CMD ["run", "package.module:stream"].
#
# PYTHON_IMAGE may name any image with Python 3.11 or newer and pip. Where no package index can be reached, it brings
# the wheels and a pip.conf that finds them (docs/operations.md, "Containers").
ARG PYTHON_IMAGE=python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
COPY pyproject.toml README.md LICENSE /src/
COPY projectors /src/projectors
COPY walstream /src/walstream
RUN pip wheel --no-cache-dir --wheel-dir /wheels /src

FROM ${PYTHON_IMAGE}
# Bind-mounting the wheels would need BuildKit; this way any builder will do.
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels walstream \
    && rm -r /wheels \
    && useradd --system --home-dir /app --create-home walstream
USER walstream
WORKDIR /app
# SIGTERM drains: what was received is ordered and confirmed, projectors finish their batch.
STOPSIGNAL SIGTERM
ENTRYPOINT ["walstream"]
CMD ["run"]
