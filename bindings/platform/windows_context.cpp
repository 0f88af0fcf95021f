// libllama has another C++ library than these bindings, mostly Microsoft's.

#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// after windows.h
#include <malloc.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "platform/context.h"
#include "platform/platform.h"
#include "platform/returned_map.h"
// internal: the parameters of a context; upstream may change it at any time
#include "llama-cparams.h"

// An exception of Microsoft's C++ library passes the frames of another one: no catch of theirs takes it. So the call has a
// frame with a handler of Windows' own, which goes on behind it.
extern "C" {

int  fitter_call(void (*function)(void *), void * data);
void fitter_called();

__attribute__((used)) EXCEPTION_DISPOSITION fitter_caught(EXCEPTION_RECORD * record, void * frame, CONTEXT * context,
                                                          DISPATCHER_CONTEXT * dispatcher) {
    constexpr DWORD of_microsoft = 0xE06D7363;
    if (record->ExceptionCode == of_microsoft && (record->ExceptionFlags & (EXCEPTION_UNWINDING | EXCEPTION_EXIT_UNWIND)) == 0) {
        RtlUnwindEx(frame, reinterpret_cast<void *>(fitter_called), record, nullptr, context, dispatcher->HistoryTable);
    }
    return ExceptionContinueSearch;
}
}

__asm__(
    ".text\n"
    ".globl fitter_call\n"
    ".globl fitter_called\n"
    ".seh_proc fitter_call\n"
    "fitter_call:\n"
    "    pushq %rbp\n"
    "    .seh_pushreg %rbp\n"
    "    subq $32, %rsp\n"
    "    .seh_stackalloc 32\n"
    "    .seh_endprologue\n"
    "    movq %rcx, %rax\n"
    "    movq %rdx, %rcx\n"
    "    callq *%rax\n"
    "    movl $1, %eax\n"
    "    jmp 1f\n"
    "fitter_called:\n"
    "    xorl %eax, %eax\n"
    "1:  addq $32, %rsp\n"
    "    popq %rbp\n"
    "    retq\n"
    "    .seh_handler fitter_caught, @except\n"
    "    .seh_endproc\n");

namespace fitter::platform {

bool call(void (*function)(void *), void * data) { return fitter_call(function, data) != 0; }

namespace {

constexpr const char * usual_breakdown = "_Z26llama_get_memory_breakdownPK13llama_context";
constexpr const char * msvc_breakdown =
    "?llama_get_memory_breakdown@@YA?AV?$map@PEAUggml_backend_buffer_type@@Ullama_memory_breakdown_data@@U?$less@"
    "PEAUggml_backend_buffer_type@@@std@@V?$allocator@U?$pair@QEAUggml_backend_buffer_type@@Ullama_memory_breakdown_data@@"
    "@std@@@4@@std@@PEBUllama_context@@@Z";

constexpr const char * usual_usage = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params";
constexpr const char * msvc_usage  = "?mtmd_get_memory_usage@@YA?AUmtmd_memory_usage@@PEBDUmtmd_context_params@@@Z";
constexpr const char * older_usage = "?mtmd_get_memory_usage@@YA?AV?$map@PEAUggml_backend_device@@_KU?$less@PEAUggml_backend_device@@"
                                     "@std@@V?$allocator@U?$pair@QEAUggml_backend_device@@_K@std@@@3@@std@@PEBDUmtmd_context_params@@"
                                     "@Z";

// From b11434 (ggml 0.26) on mtmd_get_memory_usage returns more behind the sizes, whatever the header here has.
struct usage_room {
    map_room sizes     = {};
    char     more[256] = {};
};

void * usage_of(void * library) {
    for (const char * name : {usual_usage, msvc_usage, older_usage}) {
        if (void * function = symbol_of(library, name)) {
            return function;
        }
    }
    return nullptr;
}

template <typename Function> Function found(const char * name) { return reinterpret_cast<Function>(symbol(name)); }

// ---- schedulers, where a context does not tell its own: they are seen when they are made

struct made_state {
    std::mutex                        mutex = {};
    std::vector<ggml_backend_sched_t> all   = {};
    void *                            own   = nullptr;  // ggml's function
};

// Never destroyed: contexts may be made while the process ends.
made_state & made() {
    static made_state * instance = new made_state;
    return *instance;
}

using new_function = decltype(&ggml_backend_sched_new);

ggml_backend_sched_t new_sched(ggml_backend_t * backends, ggml_backend_buffer_type_t * types, int n, size_t size, bool parallel,
                               bool op_offload) {
    ggml_backend_sched_t        sched = reinterpret_cast<new_function>(made().own)(backends, types, n, size, parallel, op_offload);
    std::lock_guard<std::mutex> lock(made().mutex);
    auto &                      all = made().all;
    all.erase(std::remove(all.begin(), all.end(), sched), all.end());
    all.push_back(sched);
    return sched;
}

// Puts a function in the place of another one that a library imports.
bool replace_import(HMODULE library, const void * own, const void * replacement) {
    const auto * base    = reinterpret_cast<const char *>(library);
    const auto * dos     = reinterpret_cast<const IMAGE_DOS_HEADER *>(base);
    const auto * headers = reinterpret_cast<const IMAGE_NT_HEADERS *>(base + dos->e_lfanew);
    const auto & part    = headers->OptionalHeader.DataDirectory[IMAGE_DIRECTORY_ENTRY_IMPORT];
    const auto * entry   = reinterpret_cast<const IMAGE_IMPORT_DESCRIPTOR *>(base + part.VirtualAddress);
    for (; part.VirtualAddress != 0 && entry->Name != 0; entry++) {
        auto * slot = reinterpret_cast<const void **>(const_cast<char *>(base) + entry->FirstThunk);
        for (; *slot != nullptr; slot++) {
            DWORD before = 0;
            if (*slot == own && VirtualProtect(slot, sizeof(*slot), PAGE_READWRITE, &before)) {
                *slot = replacement;
                VirtualProtect(slot, sizeof(*slot), before, &before);
                return true;
            }
        }
    }
    return false;
}

bool tells_sched() {
    static const bool tells = symbol("_ZNK13llama_context9get_schedEv") != nullptr;
    return tells;
}

// From when this library is loaded on.
[[maybe_unused]] const bool is_watching = [] {
    if (tells_sched()) {
        return false;
    }
    made().own   = symbol("ggml_backend_sched_new");
    auto * llama = const_cast<void *>(library_of(symbol("llama_backend_init")));
    return replace_import(static_cast<HMODULE>(llama), made().own, reinterpret_cast<const void *>(new_sched));
}();

}  // namespace

llama_memory_breakdown breakdown_of(const llama_context * context) {
    using breakdown   = returned_map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>;
    using function    = void * (*)(map_room *, const llama_context *);
    const auto same   = found<function>(usual_breakdown);
    const auto others = found<function>(msvc_breakdown);
    if (same == nullptr && others == nullptr) {
        throw std::runtime_error("it has no llama_get_memory_breakdown");
    }
    map_room room;
    (same != nullptr ? same : others)(&room, context);
    return same != nullptr ? breakdown::of_clang_or_gcc(room) : breakdown::of_microsoft(room);
}

ggml_backend_sched_t sched_of(const llama_context * context) {
    if (tells_sched()) {
        return found<ggml_backend_sched_t (*)(const llama_context *)>("_ZNK13llama_context9get_schedEv")(context);
    }
    std::lock_guard<std::mutex> lock(made().mutex);
    const auto *                words = reinterpret_cast<const ggml_backend_sched_t *>(context);
    const size_t                n     = _msize(const_cast<llama_context *>(context)) / sizeof(*words);
    const auto                  is_of = [&](ggml_backend_sched_t sched) { return std::find(words, words + n, sched) != words + n; };
    const auto                  last  = std::find_if(made().all.rbegin(), made().all.rend(), is_of);
    return last == made().all.rend() ? nullptr : *last;
}

const llama_cparams & cparams_of(const llama_context * context) {
    const auto ask = found<const llama_cparams & (*)(const llama_context *)>("_ZNK13llama_context11get_cparamsEv");
    // They follow the context's first member, a reference. Whoever reads them compares them with what llama.cpp says.
    return ask != nullptr ? ask(context)
                          : *reinterpret_cast<const llama_cparams *>(reinterpret_cast<const char *>(context) + sizeof(void *));
}

bool has_mtmd_usage(void * library) { return usage_of(library) != nullptr; }

std::map<ggml_backend_dev_t, size_t> mtmd_usage(void * library, const char * path, const mtmd_context_params & params) {
    using usage = returned_map<ggml_backend_dev_t, size_t>;
    usage_room room;
    reinterpret_cast<void * (*)(usage_room *, const char *, mtmd_context_params)>(usage_of(library))(&room, path, params);
    const bool is_usual = symbol_of(library, usual_usage) != nullptr;
    return is_usual ? usage::of_clang_or_gcc(room.sizes) : usage::of_microsoft(room.sizes);
}

}  // namespace fitter::platform
