#include "fitter.h"
#include "guard.h"

const char * fitter_last_error(void) { return fitter::last_error().c_str(); }
