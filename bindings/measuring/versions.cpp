#include "fitter.h"

// Set by CMake from the pin and from upstream's own CMakeLists.txt; the backend version is read from its header there,
// because only the files that need its interfaces include that header.
fitter_versions_t fitter_versions(void) {
    return {FITTER_LLAMA_VERSION_BASE, FITTER_LLAMA_COMMIT, FITTER_GGML_VERSION, FITTER_GGML_BACKEND_API_VERSION};
}
