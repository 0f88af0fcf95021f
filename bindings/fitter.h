// The C interface of fitter's two native libraries.
//
// The declarations between the two "cdef" lines are read twice: by the C++ compiler, and by declarations.py, which makes
// the module of them that Python imports. They hold no preprocessor lines.
//
// No function lets a C++ exception escape (guard.h). A function that can fail returns NULL, false or a negative number and leaves
// a message for fitter_last_error(). Strings that a function returns belong to the library; each says how long they live.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

// cdef: begin

// ---- libfitter: versions and errors

// What the library was compiled against. llama_commit is "" where the source tree carried no pin.
typedef struct {
    const char * llama_version;
    const char * llama_commit;
    const char * ggml_version;
    int32_t      backend_api_version;
} fitter_versions_t;

fitter_versions_t fitter_versions(void);

// What the build of llama.cpp that is loaded does otherwise than others, where nothing in it tells.
typedef struct {
    // Number of operations (GGML_OP_COUNT of its ggml.h), and ggml_op_name of the last one: "GLU" of 96 in 0.3.25, of 97
    // from 0.3.30 (b9842) and of 101 from b10068 on.
    int32_t      n_ops;
    const char * last_op;
    // Version of ggml's interface of backends (GGML_BACKEND_API_VERSION of its ggml-backend-impl.h): 2, or 3 from ggml 0.26
    // on, where a buffer type has two functions more.
    int32_t      backend_api;
    // Whether a backend's graph_optimize is given ggml_backend_graph_optimize_params, 1 or 0: not in b10605 (ggml 0.21.0), but
    // in b10739 (0.22.0). -1 where the version does not tell: then each call is looked at.
    int32_t      graph_optimize_has_params;
    // Architectures (general.architecture) whose last graph it reserves with one sequence however many there are, each
    // followed by a space: "" before v0.4.0, then "minimax-01 ", from b11053 (ggml 0.24.0) on "kimi-linear minimax-01 ".
    const char * larger_alone;
    // What its ggml-cuda does, for the rules of the profiles cuda and rocm.
    // GET_ROWS of k-quants and of what else has blocks of 256 elements: from b10361 on, not in b10068.
    bool         cuda_gets_rows_of_super_blocks;
    // Flash attention has room for f16 copies of K and V behind its result: from 0.3.30 (b9842) on, not in 0.3.25.
    bool         cuda_attention_has_room;
    // Flash attention of K and V of different types, and of q4_1, q5_0 and q5_1: from v0.5.0 on.
    bool         cuda_attention_of_any_types;
    // What the choice of experts reads stays allocated until it is made, where graph_optimize_has_params: from v0.5.0 on.
    bool         cuda_keeps_topk_moe;
    // Branches of a graph run at once (GGML_CUDA_GRAPH_OPT=1) on several devices too: from v0.4.0 on.
    bool         cuda_branches_on_many_devices;
    // Shared experts are computed together with the chosen ones: from b11434 (ggml 0.26) on.
    bool         cuda_groups_shared_experts;
    // Unary operations of a source with any strides: in b11549, not yet in b11434, which is ggml 0.26, too, and whose graphs
    // have no such operation.
    bool         cuda_unary_of_any_strides;
    // What its ggml-metal does, from b11434 (ggml 0.26) on.
    // One kernel computes a matrix product and adds another tensor to it.
    bool         metal_adds_to_products;
    // Flash attention supports only listed pairs of unequal head sizes (b11549), the indexer any number of heads.
    bool         metal_attends_by_size;
} fitter_build_t;

// To be called in each of the two libraries, libfitter and libggml-fitter, before anything is loaded, where the loaded build
// is not the one that they were compiled for. The strings are copied. Returns how many operations it has that no rule of a
// profile knows (a virtual device refuses those), or -1, and changes nothing, if its operations are not as described;
// fitter_last_error() or fitter_virtual_error() then says what differs.
int32_t fitter_configure_build(const fitter_build_t * build);

// Calls a function without arguments that returns a struct of at most so many bytes, larger than 16, into the buffer, which
// keeps what the function does not write. The buffer must have 4096 bytes or more. False where it has not.
bool fitter_probe(void * function, void * buffer, size_t size);

// Versions of the ggml that is loaded in this process.
const char * fitter_loaded_ggml_version(void);
const char * fitter_loaded_ggml_commit(void);

// Message of the last failure in this thread, "" if there was none. Lives until the next failure.
const char * fitter_last_error(void);

// Many records at once: their texts one after another, each with a final NUL, and their numbers. What it points to lives
// until the function that filled it in is called again in this thread.
typedef struct {
    const char *    texts;
    size_t          texts_size;  // in bytes
    const int64_t * numbers;
    size_t          n_numbers;
} fitter_columns_t;

// ---- libfitter: llama.cpp's log

// Takes over llama.cpp's logger for the rest of the process. Warnings and errors also go to stderr.
void fitter_log_capture(void);

// Forgets the captured lines.
void fitter_log_clear(void);

// Captured lines (information, warnings and errors, no debug lines), newest at the end: up to 2000 of them. The number
// of each is its level as ggml counts it (2 information, 3 warning, 4 error).
bool fitter_log_lines(fitter_columns_t * out);

// ---- libfitter: faults

// From now on, a fault or an abort of this process is a line "fitter: fault of process PID" on stderr before its end; a signal
// that another process sent is none. Replaces the handlers of SIGABRT, SIGBUS, SIGFPE, SIGILL and SIGSEGV.
void fitter_say_faults(void);

// ---- libfitter: devices

typedef struct {
    void *       device;           // ggml_backend_dev_t
    const char * name;
    const char * description;
    const char * device_id;        // NULL where the device has none
    const char * backend;          // name of the backend that registered it
    int32_t      type;             // enum ggml_backend_dev_type
    uint64_t     total;
    uint64_t     free;
    void *       buffer_type;      // default buffer type, ggml_backend_buffer_type_t, or NULL
    const char * buffer_type_name;
    uint64_t     largest_tensor;   // bytes of the largest tensor that it computes with, 0 where it names no limit
} fitter_device_t;

// Devices in the order of ggml's registry. Strings live as long as the device keeps its description.
int32_t fitter_device_count(void);
bool    fitter_device_get(int32_t i, fitter_device_t * out);

// What a device reaches, measured by computing on it with up to so many bytes of its memory. 0 is what could not be told.
typedef struct {
    double round_trip;  // seconds there and back
    double link;        // bytes per second to the device
    double bandwidth;   // bytes per second of weights, read for products with one vector
    double compute;     // floating-point operations per second of products with a batch
} fitter_speed_t;

// Takes about so many seconds at most, once what has begun is done.
bool fitter_device_speed(void * device, uint64_t memory, double seconds, fitter_speed_t * out);

// Loads a ggml backend into ggml's registry.
bool fitter_backend_load(const char * path);

// The i-th device of an rpc-server (host:port), without making it known to ggml's registry; out->device is NULL past the
// last one. Its memory is not asked for.
bool fitter_rpc_device(const char * endpoint, int32_t i, fitter_device_t * out);

// ---- libfitter: a load that must not end the process

// From fitter_guard_enter on, the calling thread does not abort: what ggml gives up on there is thrown to llama.cpp, which
// fails to load then, or the thread is stopped for good. With is_remote, threads of ggml-rpc's are stopped as well.
// Meanwhile llama.cpp's log is kept, and goes where it went before. NULL or false without memory.
void * fitter_guard_new(bool is_remote);
bool   fitter_guard_enter(void * guard);
void   fitter_guard_leave(void * guard);

// For the thread that waits: 1 once the other one has left, 2 if it never will, 0 where neither is so in that time.
int32_t fitter_guard_wait(void * guard, int32_t milliseconds);

// What ggml or the C++ runtime gave up with, NULL if nothing. Lives as long as the guard.
const char * fitter_guard_crash(void * guard);

// Log lines as fitter_log_lines gives them, up to 200.
bool fitter_guard_log(void * guard, fitter_columns_t * out);

// Frees the guard, unless its thread is still there.
void fitter_guard_close(void * guard);

// ---- libfitter: a loaded model (llama_model *) and context (llama_context *)

typedef struct {
    int32_t  n_layer;        // repeating layers, without the next-token-prediction ones
    int32_t  n_layer_nextn;
    int32_t  n_ctx_train;
    int32_t  n_embd;
    int32_t  n_head;
    int32_t  n_head_kv;
    int32_t  n_swa;
    int32_t  n_expert;
    int32_t  n_vocab;
    int32_t  n_devices;
    uint64_t n_params;
    uint64_t size;           // bytes of all tensors
    bool     has_encoder;
    bool     is_recurrent;
    bool     is_hybrid;
} fitter_model_info_t;

bool fitter_model_info(const void * model, fitter_model_info_t * out);

// Name of the model's i-th device, NULL past the last one.
const char * fitter_model_device(const void * model, int32_t i);

typedef struct {
    const char * buffer_type;
    const char * device;     // NULL where ggml ties the buffer type to none
    bool         is_host;    // host memory, or memory of a device that the model does not use
    uint64_t     model;
    uint64_t     context;
    uint64_t     compute;
} fitter_row_t;

// Memory of a context, a row per buffer type: those of the model's devices in the model's order, then those of the
// host, each by name. Writes at most n rows and returns how many there are, or -1.
int32_t fitter_breakdown(const void * context, fitter_row_t * rows, int32_t n);

// Name of the i-th device that a context's model is on, NULL past the last one; those behind llama.cpp's meta device for a
// model whose tensors are split over them (split mode tensor), where fitter_breakdown has a row for each.
const char * fitter_context_device(const void * context, int32_t i);

// To be called around a load of such a model (NULL first, then the model) and the making of its context (the model first,
// then the context): what is allocated meanwhile is what fitter_breakdown cannot ask for later. Around computing (the model
// first), the address behind the context's is for what that allocates.
void fitter_split_begin(const void * model);
void fitter_split_end(const void * owner);

// Reserves the graphs of a context of a model without memory (no_alloc) as llama.cpp does for one with memory, in buffers
// that are none. fitter_breakdown has their sizes from then on. False where llama.cpp fails.
bool fitter_reserve(void * context);

// Reserves a context's graphs again after adapters were set, before anything is computed. False where libllama has no
// function for it, or where that fails.
bool fitter_context_reserve(void * context);

// ---- libfitter: projectors, through libmtmd

typedef struct {
    const char * path;
    void *       device;            // ggml_backend_dev_t, NULL for the host
    int32_t      flash_attn;        // enum llama_flash_attn_type
    int32_t      image_min_tokens;  // -1: the projector's own
    int32_t      image_max_tokens;
} fitter_projector_t;

// Uses the libmtmd of this dlopen handle from now on. False if it is not the one of mtmd.h.
bool fitter_projector_library(void * handle);

// Asks libmtmd what the projector takes, in bytes. False if it cannot be loaded: the log does not say why.
bool fitter_projector_measure(const fitter_projector_t * projector, uint64_t * out);

// Loads the projector for a model, or for none (NULL). NULL if it cannot be loaded: the reason is in the log.
void * fitter_projector_load(const fitter_projector_t * projector, const void * model);
void   fitter_projector_free(void * projector);

// ---- libfitter: GGUF headers

// Opens the header of one GGUF file; tensor data is not read. NULL if it is malformed: the reason is in the log.
void * fitter_gguf_open(const char * path);
void   fitter_gguf_close(void * gguf);

typedef struct {
    uint32_t version;
    uint64_t alignment;
    uint64_t data_offset;
    int64_t  n_kv;
    int64_t  n_tensors;
} fitter_gguf_info_t;

bool fitter_gguf_info(const void * gguf, fitter_gguf_info_t * out);

// One metadata entry. kind tells which of the values holds it: 'i' integer, 'u' unsigned integer, 'f' float, 'b'
// boolean (in i), 's' string, 'a' array. Arrays give the type and the number of their elements, and for numbers and
// booleans the kind of an element; fitter_gguf_element reads those. Strings live until fitter_gguf_close.
typedef struct {
    const char * key;
    char         kind;
    int64_t      i;
    uint64_t     u;
    double       f;
    const char * s;
    const char * array_type;
    uint64_t     array_length;
    char         array_kind;  // 'i', 'u', 'f', 'b', or 0 for strings
} fitter_gguf_kv_t;

bool fitter_gguf_kv(const void * gguf, int64_t index, fitter_gguf_kv_t * out);

// Element of an array of numbers or booleans, in the field that array_kind names.
bool fitter_gguf_element(const void * gguf, int64_t index, uint64_t element, fitter_gguf_kv_t * out);

// Name and type, then the four dimensions and the bytes of every tensor.
bool fitter_gguf_tensors(const void * gguf, fitter_columns_t * out);

// ---- libfitter: a header without its tokenizer, as a file that llama.cpp can load

// Opens the header of one GGUF file in a fraction of fitter_gguf_open's time. It leaves out the tokenizer's arrays of strings
// and of more than most_values numbers: `arrays` gets the key and type of each, and its place among all entries and its
// length. data_offset gets the file's, which fitter_gguf_info then does not know. NULL where that is not possible:
// fitter_gguf_open may then say why.
void * fitter_gguf_skim(const char * path, uint64_t most_values, fitter_columns_t * arrays, uint64_t * data_offset);

// Removes what only a tokenizer reads and frees its memory; the number of tokens stays, as <architecture>.vocab_size.
// n_tokens: the number of tokens if fitter_gguf_skim left them out, else -1.
void fitter_skeleton_strip(void * gguf, int64_t n_tokens);

// Opens the header of one GGUF file as fitter_gguf_open and fitter_skeleton_strip would leave it, in a fraction of the time.
// NULL where that is not possible: fitter_gguf_open may then say why.
void * fitter_skeleton_open(const char * path);

// Offset and size in the file of the entry that names the architecture and of each that only a tokenizer reads (key, type
// and value), in their order. false where the file's metadata cannot be stepped through.
bool fitter_tokenizer_entries(const char * path, fitter_columns_t * out);

// Writes the stripped headers of all n files of a model as one sparse file and returns its descriptor, which is the
// caller's; the file is private and has no name (on Windows it has one, and the caller removes it). The headers can only
// be closed then. -1 if there can be no such file.
int32_t fitter_skeleton_write(void * const * gguf, int32_t n);

// ---- libfitter: what llama-quantize would make of a model

typedef struct {
    const char * name;          // llama-quantize's, such as Q4_K_M
    int32_t      ftype;         // enum llama_ftype
    const char * default_type;  // ggml's name of the type that most tensors get
} fitter_file_type_t;

// The file types that the loaded llama.cpp can quantize to. Writes at most n and returns how many there are, or -1 where it
// does not tell which tensor gets which type.
int32_t fitter_quant_file_types(fitter_file_type_t * out, int32_t n);

// A model to be quantized, of the headers of all n files, which must stay open as long; they may be stripped. NULL if
// llama.cpp has no rule for it.
void * fitter_quant_new(void * const * gguf, int32_t n);
void   fitter_quant_free(void * quant);

// Name and type of every tensor in a file of that type, in the file's order, then its bytes; without an importance matrix.
// False where llama.cpp cannot quantize the model so.
bool fitter_quant_types(void * quant, int32_t ftype, fitter_columns_t * out);

// Bytes before the first tensor in a file that llama-quantize writes of the whole headers of all n files, or -1.
int64_t fitter_quant_header_bytes(void * const * gguf, int32_t n);

// Writes the header of a file of that type to path.
bool fitter_quant_write(void * quant, int32_t ftype, const char * path);

// ---- libfitter: tensor name patterns, as llama.cpp reads them

// Compiles a pattern; NULL if it is no regular expression.
void * fitter_regex_new(const char * pattern);
void   fitter_regex_free(void * regex);

// Whether a part of text matches: 1 or 0, -1 on failure.
int32_t fitter_regex_search(const void * regex, const char * text);

// ---- libggml-fitter: the virtual-device backend

// Describes the devices (the format of FITTER_DEVICES; "" is none) and, before the backend is loaded, makes it register
// 16 slots and a recorder device instead of reading the environment. A later call changes what the slots are: nothing
// may be loaded on them then. The first devices of the backend are the described ones, in order; the rest is unused.
// Returns the number of devices, or -1: fitter_virtual_error() then says what is wrong, and nothing has changed.
int32_t      fitter_virtual_configure(const char * description);
const char * fitter_virtual_error(void);

// Whether the loads from now on have the host of the described machine, as after a description, or that of this one,
// with every layout of weights that its processor has.
void fitter_virtual_host_is_described(bool is_described);

// Whether this machine's processor has layouts of weights beside CPU_REPACK, and to do without them in this process.
bool fitter_virtual_has_own_layouts(void);
void fitter_virtual_leave_out_own_layouts(void);

// NULL, or how ggml called the backend otherwise than the configured build does: what was measured on it does not count then.
// Something has to be loaded on a virtual device before that can be told. Lives as long as the process.
const char * fitter_virtual_build_difference(void);

// ggml_backend_dev_t of a described device, NULL past the last one; of the recorder device; whether a device is ours.
void * fitter_virtual_device(int32_t i);
void * fitter_virtual_recorder(void);
bool   fitter_virtual_owns(const void * device);

// GGML_BACKEND_API_VERSION of the ggml that is loaded, -1 if it has no backend registered.
int32_t fitter_virtual_loaded_api_version(void);

// Registers the CUDA backend of a library that is no plugin. On failure fitter_virtual_error() says why.
bool fitter_virtual_adopt(const char * path);

// Recording of tensor sizes. "allocated" writes down each tensor that gets a place in a buffer that was really
// allocated; "sized" each tensor whose size a virtual buffer type is asked for.
//   0 off, 1 allocated, 2 sized
void fitter_virtual_record(int32_t mode);
void fitter_virtual_record_clear(void);

// Buffer type and name of each recorded tensor; its bytes, 1 where it is a weight, the bytes of one of its rows, and how
// many rows (ne[1]) and planes of them (ne[2]) it has. Valid until recording goes on.
bool fitter_virtual_records(fitter_columns_t * out);

// Alignment in bytes of the recorder device's buffer type.
uint64_t fitter_virtual_alignment(void);

// ---- libggml-fitter: what is allocated

// Counts all buffers that are allocated through the default and host buffer types of ggml's devices until it ends, and
// unless really, makes each of them a mere range of addresses. Those can still be freed later. False where it has begun
// already.
bool fitter_allocations_begin(bool really);
void fitter_allocations_end(void);

// The most that was allocated at once, a row per buffer type: model bytes, or compute where the buffer is for that. If
// really, all that was allocated, as model bytes. The host has no device. Writes at most n rows and returns how many
// there are, or -1; fitter_virtual_error() then says why.
int32_t fitter_allocations_rows(fitter_row_t * rows, int32_t n);

// From the first on, each buffer of ordinary host memory (the CPU's buffer type, and what takes its buffers) is a range
// of addresses that takes memory only where something other than zeros is written; until the second. They can be freed
// later. False where it has begun already.
bool fitter_host_untouched_begin(void);
void fitter_host_untouched_end(void);

// ---- libfitter-cells: caches without their cells

// From the first on, until the second, the cells of a KV cache that the calling thread makes take next to no memory; a
// cache has n_cells of them for each of its streams. Only for one that nothing is ever computed with, and only where the
// library was opened before libllama and for all: else nothing is different.
void fitter_cells_begin(uint64_t n_cells);
void fitter_cells_end(void);

// cdef: end

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
