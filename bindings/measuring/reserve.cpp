// Makes a context reserve its graphs again, as it does by itself before it computes with what was changed.

#include "builds/lookup.h"
#include "fitter.h"
#include "guard.h"

bool fitter_context_reserve(void * context) {
    return fitter::guarded(false, [&] {
        // No C function does it without computing. A member function takes its object first.
        const char * name    = "_ZN13llama_context13sched_reserveEv";
        auto         reserve = fitter::loaded<void (*)(void *)>(name);
        if (reserve == nullptr) {
            fitter::set_error("it has no llama_context::sched_reserve()");
            return false;
        }
        reserve(context);
        return true;
    });
}
