// What differs between systems: the libraries of a process, addresses, files, threads. A file for each system has it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fitter::platform {

// ---- libraries

// What a library of this process calls so, C++ functions by the name that GCC and Clang give them; nullptr where none does.
void * symbol(const char * name);

// The same of one library, by the handle that it was opened with.
void * symbol_of(void * library, const char * name);

// Opens a library for good. Where that fails, nullptr and why.
void * open_library(const char * path, std::string & why);

// Something that is the same for all addresses of a library, nullptr for other addresses.
const void * library_of(const void * address);

// ---- addresses

// A range of addresses without memory: nobody may use them, or each page gets memory, zeros, when it is first used.
// nullptr where the system has no such range.
enum class use { never, by_pages };

void * reserve(size_t size, use used);
void   release(void * base, size_t size);

// Takes the memory of pages back, which are zeros then. False where nothing was done.
bool forget(void * base, size_t size);

// ---- files, by descriptor; a path is UTF-8 where the system has no bytes for it. -1 or false with errno where it fails

int  open_file(const char * path);
int  create_file(const char * path);
int  create_private_file();  // without a name where the system has such files, gone with the last process that holds it
void close_file(int file);

// Bytes of a file; 0 where it is none that can be read at any place.
uint64_t length_of(int file);

// Bytes that were read, fewer at the end and where it fails.
size_t read_at(int file, void * output, size_t n, uint64_t offset);

bool write_all(int file, const void * data, size_t n);

// Makes a file longer without writing to it: its end takes no room.
bool lengthen(int file, uint64_t length);

// ---- this process

// Where the stack of this thread begins, at its highest address; 0 if that is not known.
uintptr_t top_of_stack();

// Never returns, and handles no signal.
[[noreturn]] void stop_thread();

// Has a fault or an abort call a function with the number of this process before its end, and nothing that another process does.
void on_fault(void (*function)(long process));

}  // namespace fitter::platform
