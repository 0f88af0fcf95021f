# fitter to plan and to serve, without llama.cpp's programs: docker build --tag llama-fitter . after make wheel.
# Python 3.13 by its digest, of linux/amd64 and linux/arm64: docker buildx imagetools inspect python:3.13-slim names it.
ARG PYTHON=3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b
FROM docker.io/library/python:${PYTHON} AS build

COPY dist/*.whl /wheels/
COPY packaging/pins/tools.txt /wheels/
# The wheel of this processor, whatever else is in dist. Left out: what downloads whole files, and compiled code of large
# packages that plans hardly use.
# hadolint ignore=DL3013
RUN python -m venv /opt/fitter \
    && wheel="$(echo /wheels/llama_fitter-*manylinux*_"$(uname -m)".whl)" \
    && /opt/fitter/bin/pip install --no-cache-dir --only-binary :all: --constraint /wheels/tools.txt --no-compile "${wheel}[web,report,remote]" \
    && /opt/fitter/bin/pip uninstall --yes hf-xet pip \
    && find /opt/fitter -type d -name tests -prune -exec rm -r {} + \
    && /opt/fitter/bin/python -m compileall -q -x '/(numpy|pygments|huggingface_hub|yaml)/' /opt/fitter/lib

FROM docker.io/library/python:${PYTHON}

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
