#pragma once

// Copies of these functions call what older libstdc++ do not export, and every libstdc++ exports these.
#include <new>
#include <typeinfo>
#define _GLIBCXX_EH_PTR_RELOPS_COMPAT
#define __used__ __gnu_inline__, __noinline__
#include_next <bits/exception_ptr.h>
#undef __used__
#undef _GLIBCXX_EH_PTR_RELOPS_COMPAT
