// Nothing is linked to llama.cpp: its DLLs have many names. Each function is a jump to an address that is looked up in them when
// this library is loaded (bound_functions.py), which fails without one of those.

#define WIN32_LEAN_AND_MEAN
#define PSAPI_VERSION 2
#include <windows.h>
// after windows.h
#include <io.h>
#include <psapi.h>
#include <winioctl.h>

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <cwchar>
#include <map>
#include <vector>

#include "platform/bound_functions.h"
#include "platform/platform.h"

namespace fitter::platform {

namespace {

struct two_names {
    const char * usual;
    const char * other;
};

// C++ functions, and what Microsoft's compiler calls them, or another one where size_t is no unsigned long.
constexpr two_names cpp_functions[] = {
#include "platform/msvc_names.inc"
};

// llama.cpp's libraries, each known by a function.
constexpr const char * of_llama[] = {"llama_backend_init", "ggml_backend_dev_count", "ggml_backend_buft_name"};

const std::vector<HMODULE> & llama_libraries() {
    static const std::vector<HMODULE> found = [] {
        std::vector<HMODULE> all(1024);
        DWORD                bytes = 0;
        if (!EnumProcessModules(GetCurrentProcess(), all.data(), static_cast<DWORD>(all.size() * sizeof(HMODULE)), &bytes)) {
            bytes = 0;
        }
        all.resize(std::min(all.size(), bytes / sizeof(HMODULE)));
        std::vector<HMODULE> kept;
        for (const char * name : of_llama) {
            for (HMODULE library : all) {
                if (GetProcAddress(library, name) != nullptr) {
                    if (std::find(kept.begin(), kept.end(), library) == kept.end()) {
                        kept.push_back(library);
                    }
                    break;
                }
            }
        }
        return kept;
    }();
    return found;
}

std::wstring wide(const char * text) {
    const int    n = MultiByteToWideChar(CP_UTF8, 0, text, -1, nullptr, 0);
    std::wstring result(static_cast<size_t>(std::max(n, 1)), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, text, -1, result.data(), n);
    return result;
}

HANDLE handle_of(int file) { return reinterpret_cast<HANDLE>(_get_osfhandle(file)); }

// ---- ranges whose pages get memory when they are used. Windows promises memory for each page that may be used, or none for one
// that may not: what is asked for at first use is promised then.

struct range_state {
    SRWLOCK                     lock   = SRWLOCK_INIT;
    std::map<uintptr_t, size_t> ranges = {};
};

// Never destroyed: what is reserved may be used while the process ends.
range_state & ranges() {
    static range_state * instance = new range_state;
    return *instance;
}

bool is_reserved(uintptr_t address) {
    range_state & all = ranges();
    AcquireSRWLockShared(&all.lock);
    auto       next  = all.ranges.upper_bound(address);
    const bool found = next != all.ranges.begin() && address - std::prev(next)->first < std::prev(next)->second;
    ReleaseSRWLockShared(&all.lock);
    return found;
}

LONG CALLBACK give_memory(EXCEPTION_POINTERS * exception) {
    const EXCEPTION_RECORD * record = exception->ExceptionRecord;
    if (record->ExceptionCode != EXCEPTION_ACCESS_VIOLATION || record->NumberParameters < 2) {
        return EXCEPTION_CONTINUE_SEARCH;
    }
    const auto      address = static_cast<uintptr_t>(record->ExceptionInformation[1]);
    constexpr auto  page    = uintptr_t{1} << 16;
    MEMORY_BASIC_INFORMATION there = {};
    if (!is_reserved(address) || VirtualQuery(reinterpret_cast<void *>(address), &there, sizeof(there)) == 0) {
        return EXCEPTION_CONTINUE_SEARCH;
    }
    // What follows up to the end of the piece that is without memory: another thread may have been quicker.
    const uintptr_t begin = address / page * page;
    const uintptr_t end   = std::min(begin + page, reinterpret_cast<uintptr_t>(there.BaseAddress) + there.RegionSize);
    const uintptr_t start = std::max(begin, reinterpret_cast<uintptr_t>(there.BaseAddress));
    const bool      given = there.State == MEM_COMMIT ||
                       VirtualAlloc(reinterpret_cast<void *>(start), end - start, MEM_COMMIT, PAGE_READWRITE) != nullptr;
    return given ? EXCEPTION_CONTINUE_EXECUTION : EXCEPTION_CONTINUE_SEARCH;
}

}  // namespace

void * symbol(const char * name) {
    for (HMODULE library : llama_libraries()) {
        if (void * found = symbol_of(library, name)) {
            return found;
        }
    }
    for (const two_names & each : cpp_functions) {
        void * found = std::strcmp(each.usual, name) == 0 ? symbol(each.other) : nullptr;
        if (found != nullptr) {
            return found;
        }
    }
    return nullptr;
}

void * symbol_of(void * library, const char * name) {
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(library), name));
}

void * open_library(const char * path, std::string & why) {
    HMODULE library = LoadLibraryW(wide(path).c_str());
    if (library == nullptr) {
        why = "Windows' error " + std::to_string(GetLastError());
    }
    return reinterpret_cast<void *>(library);
}

const void * library_of(const void * address) {
    // a function of llama.cpp's is a jump here
    const auto * bytes = static_cast<const unsigned char *>(address);
    for (const bound_function & each : bound_functions()) {
        if (each.jump == address) {
            bytes = static_cast<const unsigned char *>(*each.target);
        }
    }
    constexpr DWORD flags   = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    HMODULE         library = nullptr;
    return GetModuleHandleExW(flags, reinterpret_cast<LPCWSTR>(bytes), &library) ? library : nullptr;
}

void * reserve(size_t size, use used) {
    void * base = VirtualAlloc(nullptr, size, MEM_RESERVE, used == use::by_pages ? PAGE_READWRITE : PAGE_NOACCESS);
    if (base != nullptr && used == use::by_pages) {
        static void * const handler = AddVectoredExceptionHandler(1, give_memory);
        if (handler == nullptr) {
            VirtualFree(base, 0, MEM_RELEASE);
            return nullptr;
        }
        range_state & all = ranges();
        AcquireSRWLockExclusive(&all.lock);
        all.ranges[reinterpret_cast<uintptr_t>(base)] = size;
        ReleaseSRWLockExclusive(&all.lock);
    }
    return base;
}

void release(void * base, size_t /*size*/) {
    range_state & all = ranges();
    AcquireSRWLockExclusive(&all.lock);
    all.ranges.erase(reinterpret_cast<uintptr_t>(base));
    ReleaseSRWLockExclusive(&all.lock);
    VirtualFree(base, 0, MEM_RELEASE);
}

bool forget(void * base, size_t size) { return VirtualFree(base, size, MEM_DECOMMIT) != 0; }

int open_file(const char * path) { return _wopen(wide(path).c_str(), _O_RDONLY | _O_BINARY | _O_NOINHERIT); }

int create_file(const char * path) {
    return _wopen(wide(path).c_str(), _O_RDWR | _O_CREAT | _O_TRUNC | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
}

// llama.cpp can open no file without a name, nor one that is deleted when it is closed.
int create_private_file() {
    wchar_t         directory[MAX_PATH + 1] = L"";
    wchar_t         name[MAX_PATH + 1]      = L"";
    const wchar_t * told                    = _wgetenv(L"TMPDIR");
    if (told != nullptr && std::wcslen(told) < MAX_PATH) {
        std::wcscpy(directory, told);
    } else {
        GetTempPathW(MAX_PATH + 1, directory);
    }
    if (GetTempFileNameW(directory, L"fit", 0, name) == 0) {
        errno = EACCES;
        return -1;
    }
    return _wopen(name, _O_RDWR | _O_BINARY | _O_NOINHERIT | _O_SHORT_LIVED | _O_TRUNC);
}

void close_file(int file) { _close(file); }

uint64_t length_of(int file) {
    LARGE_INTEGER length = {};
    const bool    is_one = GetFileType(handle_of(file)) == FILE_TYPE_DISK && GetFileSizeEx(handle_of(file), &length);
    return is_one ? static_cast<uint64_t>(length.QuadPart) : 0;
}

size_t read_at(int file, void * output, size_t n, uint64_t offset) {
    OVERLAPPED at   = {};
    at.Offset       = static_cast<DWORD>(offset);
    at.OffsetHigh   = static_cast<DWORD>(offset >> 32);
    DWORD      done = 0;
    const auto most = static_cast<DWORD>(std::min<size_t>(n, 1 << 30));
    return ReadFile(handle_of(file), output, most, &done, &at) ? done : 0;
}

bool write_all(int file, const void * data, size_t n) {
    for (size_t done = 0; done < n;) {
        const int written = _write(file, static_cast<const char *>(data) + done, static_cast<unsigned>(std::min<size_t>(n - done, 1 << 30)));
        if (written <= 0) {
            return false;
        }
        done += static_cast<size_t>(written);
    }
    return true;
}

bool lengthen(int file, uint64_t length) {
    DWORD bytes = 0;
    // Without that each byte takes room. Not every file system can do it.
    DeviceIoControl(handle_of(file), FSCTL_SET_SPARSE, nullptr, 0, nullptr, 0, &bytes, nullptr);
    LARGE_INTEGER end = {};
    end.QuadPart      = static_cast<LONGLONG>(length);
    if (!SetFilePointerEx(handle_of(file), end, nullptr, FILE_BEGIN) || !SetEndOfFile(handle_of(file))) {
        errno = ENOSPC;
        return false;
    }
    return true;
}

uintptr_t top_of_stack() {
    ULONG_PTR low = 0, high = 0;
    GetCurrentThreadStackLimits(&low, &high);
    return high;
}

void stop_thread() {
    for (;;) {
        Sleep(INFINITE);
    }
}

namespace {

void (*called)(long) = nullptr;

void on_abort(int) {
    called(static_cast<long>(GetCurrentProcessId()));
}

LONG WINAPI on_exception(EXCEPTION_POINTERS *) {
    called(static_cast<long>(GetCurrentProcessId()));
    return EXCEPTION_CONTINUE_SEARCH;
}

}  // namespace

void on_fault(void (*function)(long)) {
    called = function;
    // no windows that wait for a click
    SetErrorMode(SEM_FAILCRITICALERRORS | SEM_NOGPFAULTERRORBOX);
    std::signal(SIGABRT, on_abort);
    SetUnhandledExceptionFilter(on_exception);
}

}  // namespace fitter::platform

extern "C" BOOL WINAPI DllMain(HINSTANCE, DWORD reason, LPVOID) {
    if (reason == DLL_PROCESS_ATTACH) {
        for (const auto & each : fitter::platform::bound_functions()) {
            *each.target = fitter::platform::symbol(each.name);
            if (*each.target == nullptr) {
                return FALSE;
            }
        }
    }
    return TRUE;
}
