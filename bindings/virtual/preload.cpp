// Loaded into a program of llama.cpp before all else (LD_PRELOAD): has its ggml load the backend of virtual devices, which
// many programs do not look for by themselves. It needs nothing of ggml, so that any program can have it.

#include <dlfcn.h>

#include <cstdlib>

__attribute__((constructor)) static void load() {
    const char * path = std::getenv("FITTER_BACKEND");
    void *       load = path == nullptr ? nullptr : dlsym(RTLD_DEFAULT, "ggml_backend_load");
    if (load != nullptr) {
        reinterpret_cast<void * (*) (const char *)>(load)(path);
    }
}
