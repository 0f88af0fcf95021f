#pragma once

#include_next <bits/c++config.h>

// Functions that came with a later glibc; libstdc++ has a way without each.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK

// The same, of a later libstdc++: a size that is no size is no memory either.
#define __throw_bad_array_new_length __throw_bad_alloc
