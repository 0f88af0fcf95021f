#pragma once

// glibc has it from 2.32 on. Without it every count of references is an atomic one.
static const char __libc_single_threaded = 0;
