# One image for each service: docker build --target admission .
# Only what the classic builder understands, so that no plugin is needed.

ARG PYTHON=python:3.11-slim-bookworm

# --- what all services need of others
FROM ${PYTHON} AS others
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt deploy/requirements.py ./
COPY proto/pyproject.toml proto/
COPY runtime/pyproject.toml runtime/
RUN python -m venv --without-pip /opt/waterclock \
 && pip install hatchling \
 && python requirements.py proto runtime > others.txt \
 && pip --python /opt/waterclock install -r others.txt

# --- what all services share of ours
FROM others AS shared
COPY proto proto
COPY runtime runtime
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./proto ./runtime

# --- each service's own environment
FROM others AS build-admission
COPY services/admission/pyproject.toml services/admission/
RUN python requirements.py services/admission > others.txt \
 && pip --python /opt/waterclock install -r others.txt
COPY services/admission services/admission
COPY --from=shared /wheels /wheels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./services/admission \
 && pip --python /opt/waterclock install --no-deps /wheels/*.whl

FROM others AS build-scheduler
COPY services/scheduler/pyproject.toml services/scheduler/
RUN python requirements.py services/scheduler > others.txt \
 && pip --python /opt/waterclock install -r others.txt
COPY services/scheduler services/scheduler
COPY --from=shared /wheels /wheels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./services/scheduler \
 && pip --python /opt/waterclock install --no-deps /wheels/*.whl

FROM others AS build-worker
COPY services/worker/pyproject.toml services/worker/
RUN python requirements.py services/worker > others.txt \
 && pip --python /opt/waterclock install -r others.txt
COPY services/worker services/worker
COPY --from=shared /wheels /wheels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./services/worker \
 && pip --python /opt/waterclock install --no-deps /wheels/*.whl

FROM others AS build-ledger
COPY services/ledger/pyproject.toml services/ledger/
RUN python requirements.py services/ledger > others.txt \
 && pip --python /opt/waterclock install -r others.txt
COPY services/ledger services/ledger
COPY --from=shared /wheels /wheels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./services/ledger \
 && pip --python /opt/waterclock install --no-deps /wheels/*.whl

# The command without what it needs to draw and to run servers: only waterclock.init is run here.
FROM others AS build-init
COPY cli cli
COPY --from=shared /wheels /wheels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./cli \
 && pip --python /opt/waterclock install --no-deps /wheels/*.whl

# --- the images. Each service has a user of its own, so that one cannot read another's secrets;
# compose.yaml names the same numbers to waterclock.init.
FROM ${PYTHON} AS image
ENV PATH=/opt/waterclock/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1

FROM image AS init
COPY --from=build-init /opt/waterclock /opt/waterclock
ENTRYPOINT ["python", "-m", "waterclock.init"]

FROM image AS admission
RUN install -d -m 0700 -o 10001 -g 10001 /var/lib/waterclock
COPY --from=build-admission /opt/waterclock /opt/waterclock
USER 10001:10001
EXPOSE 8080
CMD ["python", "-m", "waterclock_admission"]

FROM image AS scheduler
RUN install -d -m 0700 -o 10002 -g 10002 /var/lib/waterclock
COPY --from=build-scheduler /opt/waterclock /opt/waterclock
USER 10002:10002
CMD ["python", "-m", "waterclock_scheduler"]

# The name of the worker is the argument, as in [workers.NAME].
FROM image AS worker
RUN install -d -m 0700 -o 10003 -g 10003 /var/lib/waterclock
COPY --from=build-worker /opt/waterclock /opt/waterclock
USER 10003:10003
ENTRYPOINT ["python", "-m", "waterclock_worker"]

FROM image AS ledger
RUN install -d -m 0700 -o 10004 -g 10004 /var/lib/waterclock
COPY --from=build-ledger /opt/waterclock /opt/waterclock
USER 10004:10004
CMD ["python", "-m", "waterclock_ledger"]
