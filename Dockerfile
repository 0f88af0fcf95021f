# fitter to plan and to serve, without llama.cpp's programs: docker build --tag llama-fitter . after make wheel.
ARG PYTHON=3.13
FROM docker.io/library/python:${PYTHON}-slim AS build

COPY dist/*.whl /wheels/
# The wheel of this processor, whatever else is in dist. Left out: what downloads whole files, and compiled code of large
# packages that plans hardly use.
# hadolint ignore=DL3013
RUN python -m venv /opt/fitter \
    && wheel="$(echo /wheels/llama_fitter-*manylinux*_"$(uname -m)".whl)" \
    && /opt/fitter/bin/pip install --no-cache-dir --only-binary :all: --no-compile "${wheel}[web,report,remote]" \
    && /opt/fitter/bin/pip uninstall --yes hf-xet pip \
    && find /opt/fitter -type d -name tests -prune -exec rm -r {} + \
    && /opt/fitter/bin/python -m compileall -q -x '/(numpy|pygments|huggingface_hub|yaml)/' /opt/fitter/lib

FROM docker.io/library/python:${PYTHON}-slim

COPY --from=build /opt/fitter /opt/fitter
RUN useradd --uid 1000 --create-home --shell /usr/sbin/nologin fitter \
    && mkdir -p /models /home/fitter/.cache \
    && chown fitter:fitter /models /home/fitter/.cache
ENV PATH=/opt/fitter/bin:$PATH
USER 1000:1000
WORKDIR /models
VOLUME /home/fitter/.cache
EXPOSE 8080
# Commands that plan end before it is asked.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/', timeout=4)"]
CMD ["fitter", "serve", "--host", "0.0.0.0", "--root", "/models"]
