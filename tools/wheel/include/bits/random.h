#pragma once

// A later libstdc++ can say how good the system's random numbers are.
#include <bits/c++config.h>
#undef _GLIBCXX_USE_DEV_RANDOM
#include_next <bits/random.h>
