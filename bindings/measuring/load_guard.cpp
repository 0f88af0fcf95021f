// A load in a process that must outlive it: where ggml aborts, the load fails instead.
//
// ggml calls the abort callback on the thread that gave up. On the thread that loads, the callback throws: llama.cpp
// catches what its loader throws, so its locks are released and its memory is freed, and the load fails like any other.
// Where nobody catches it (a destructor, a frame without unwind tables) the terminate handler stops the thread for good.
// A thread of ggml-rpc's that gives up is stopped as well: what waits for it never goes on, and its guard says so.

#include <cstring>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <cxxabi.h>

#include "fitter.h"
#include "ggml.h"
#include "guard.h"
#include "llama.h"
#include "platform/platform.h"

namespace {

constexpr size_t max_lines = 200;

struct load_guard {
    std::string                                 crash;
    bool                                        has_crashed = false;
    bool                                        is_stuck    = false;
    bool                                        has_left    = false;
    bool                                        is_remote   = false;
    std::string                                 partial;
    ggml_log_level                              level = GGML_LOG_LEVEL_NONE;
    std::deque<std::pair<int64_t, std::string>> lines;
};

// Never destroyed: a thread that was stopped may be in here while the process ends.
struct guard_state {
    std::mutex                mutex;
    std::condition_variable   changed;
    std::vector<load_guard *> entered;
    ggml_abort_callback_t     abort_before     = nullptr;
    std::terminate_handler    terminate_before = nullptr;
    ggml_log_callback         log_before       = nullptr;
    void *                    log_data_before  = nullptr;
};

guard_state & state() {
    static guard_state * instance = new guard_state;
    return *instance;
}

thread_local load_guard * own = nullptr;

void note_crash(load_guard & guard, const char * message, bool is_stuck) {
    guard_state &               all = state();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (!guard.has_crashed) {
        guard.crash = message;
    }
    guard.has_crashed = true;
    guard.is_stuck    = guard.is_stuck || is_stuck;
    all.changed.notify_all();
}

// The guard of a load that uses remote devices, where a thread of ggml-rpc's gives up.
load_guard * guard_of_remote(const char * message) {
    if (std::strstr(message, "ggml-rpc") == nullptr) {
        return nullptr;
    }
    guard_state &               all = state();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (load_guard * guard : all.entered) {
        if (guard->is_remote && !guard->has_left) {
            return guard;
        }
    }
    return nullptr;
}

void on_abort(const char * message) {
    if (own != nullptr) {
        const bool is_unwinding = std::uncaught_exceptions() > 0;
        note_crash(*own, message, is_unwinding);
        if (!is_unwinding) {
            throw std::runtime_error(message);
        }
        fitter::platform::stop_thread();
    }
    if (load_guard * guard = guard_of_remote(message)) {
        note_crash(*guard, message, true);
        fitter::platform::stop_thread();
    }
    ggml_abort_callback_t before = state().abort_before;
    if (before != nullptr) {
        before(message);
    } else {
        std::fprintf(stderr, "%s\n", message);
    }
}

[[noreturn]] void on_terminate() {
    if (own != nullptr) {
        std::string message = "uncaught C++ exception";
        // Nothing is thrown where nothing was: that would end here again.
        if (abi::__cxa_current_exception_type() != nullptr) {
            try {
                throw;
            } catch (const std::exception & error) {
                message = error.what();
            } catch (...) {
            }
        }
        note_crash(*own, message.c_str(), true);
        fitter::platform::stop_thread();
    }
    if (std::terminate_handler before = state().terminate_before) {
        before();
    }
    std::abort();
}

void keep_line(load_guard & guard) {
    if (!guard.partial.empty() && guard.level != GGML_LOG_LEVEL_DEBUG) {
        guard.lines.emplace_back(guard.level, guard.partial);
        if (guard.lines.size() > max_lines) {
            guard.lines.pop_front();
        }
    }
    guard.partial.clear();
}

void on_log(ggml_log_level level, const char * text, void *) {
    guard_state & all = state();
    fitter::guarded(false, [&] {
        std::lock_guard<std::mutex> lock(all.mutex);
        for (load_guard * guard : all.entered) {
            if (level != GGML_LOG_LEVEL_CONT) {
                keep_line(*guard);
                guard->level = level;
            }
            const char * rest = text;
            while (const char * end = std::strchr(rest, '\n')) {
                guard->partial.append(rest, end);
                keep_line(*guard);
                rest = end + 1;
            }
            guard->partial.append(rest);
        }
        return true;
    });
    if (all.log_before != nullptr) {
        all.log_before(level, text, all.log_data_before);
    }
}

void install() {
    guard_state & all    = state();
    all.abort_before     = ggml_set_abort_callback(on_abort);
    all.terminate_before = std::set_terminate(on_terminate);
    llama_log_get(&all.log_before, &all.log_data_before);
    llama_log_set(on_log, nullptr);
}

// Puts back what was there before; whoever has put something else there meanwhile keeps it.
void uninstall() {
    guard_state &         all   = state();
    ggml_abort_callback_t found = ggml_set_abort_callback(all.abort_before);
    if (found != on_abort) {
        ggml_set_abort_callback(found);
    }
    if (std::get_terminate() == on_terminate) {
        std::set_terminate(all.terminate_before);
    }
    ggml_log_callback log  = nullptr;
    void *            data = nullptr;
    llama_log_get(&log, &data);
    if (log == on_log) {
        llama_log_set(all.log_before, all.log_data_before);
    }
}

void remove(load_guard * guard) {
    guard_state & all = state();
    for (size_t i = 0; i < all.entered.size(); i++) {
        if (all.entered[i] == guard) {
            all.entered.erase(all.entered.begin() + static_cast<std::ptrdiff_t>(i));
            if (all.entered.empty()) {
                uninstall();
            }
            return;
        }
    }
}

}  // namespace

void * fitter_guard_new(bool is_remote) {
    return fitter::guarded<void *>(nullptr, [&]() -> void * {
        auto * guard     = new load_guard;
        guard->is_remote = is_remote;
        return guard;
    });
}

bool fitter_guard_enter(void * pointer) {
    return fitter::guarded(false, [&] {
        auto *                      guard = static_cast<load_guard *>(pointer);
        guard_state &               all   = state();
        std::lock_guard<std::mutex> lock(all.mutex);
        all.entered.push_back(guard);
        if (all.entered.size() == 1) {
            install();
        }
        own = guard;
        return true;
    });
}

void fitter_guard_leave(void * pointer) {
    fitter::guarded([&] {
        auto *                      guard = static_cast<load_guard *>(pointer);
        guard_state &               all   = state();
        std::lock_guard<std::mutex> lock(all.mutex);
        own = nullptr;
        remove(guard);
        keep_line(*guard);
        guard->has_left = true;
        all.changed.notify_all();
    });
}

int32_t fitter_guard_wait(void * pointer, int32_t milliseconds) {
    return fitter::guarded<int32_t>(-1, [&] {
        auto *                       guard = static_cast<load_guard *>(pointer);
        guard_state &                all   = state();
        std::unique_lock<std::mutex> lock(all.mutex);
        all.changed.wait_for(lock, std::chrono::milliseconds(milliseconds),
                             [&] { return guard->has_left || guard->is_stuck; });
        return guard->has_left ? 1 : guard->is_stuck ? 2 : 0;
    });
}

const char * fitter_guard_crash(void * pointer) {
    return fitter::guarded<const char *>(nullptr, [&]() -> const char * {
        auto *                      guard = static_cast<load_guard *>(pointer);
        guard_state &               all   = state();
        std::lock_guard<std::mutex> lock(all.mutex);
        return guard->has_crashed ? guard->crash.c_str() : nullptr;
    });
}

bool fitter_guard_log(void * pointer, fitter_columns_t * out) {
    return fitter::guarded(false, [&] {
        thread_local std::string          texts;
        thread_local std::vector<int64_t> levels;

        auto *                      guard = static_cast<load_guard *>(pointer);
        std::lock_guard<std::mutex> lock(state().mutex);
        texts.clear();
        levels.clear();
        for (const auto & [level, text] : guard->lines) {
            texts.append(text.c_str()).push_back('\0');
            levels.push_back(level);
        }
        *out = {texts.data(), texts.size(), levels.data(), levels.size()};
        return true;
    });
}

void fitter_guard_close(void * pointer) {
    fitter::guarded([&] {
        auto *                      guard = static_cast<load_guard *>(pointer);
        guard_state &               all   = state();
        std::lock_guard<std::mutex> lock(all.mutex);
        if (guard->has_left) {
            delete guard;
        } else if (guard->is_stuck) {
            // Its thread never comes back; it is as good as gone, but may be inside of the guard.
            remove(guard);
        }
    });
}
