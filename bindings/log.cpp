// llama.cpp's log, captured without a way through Python: a dummy load writes thousands of lines.

#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

#include "fitter.h"
#include "guard.h"
#include "llama.h"

namespace {

constexpr size_t max_lines = 2000;

struct line {
    ggml_log_level level;
    std::string    text;
};

// Never destroyed: llama.cpp may log while the process ends.
struct log_state {
    std::mutex       mutex;
    std::deque<line> lines;
    std::string      partial;
    ggml_log_level   level = GGML_LOG_LEVEL_NONE;
};

log_state & state() {
    static log_state * instance = new log_state;
    return *instance;
}

void finish_line(log_state & log) {
    if (log.level != GGML_LOG_LEVEL_DEBUG && !log.partial.empty()) {
        if (log.level == GGML_LOG_LEVEL_WARN || log.level == GGML_LOG_LEVEL_ERROR) {
            std::fprintf(stderr, "%s\n", log.partial.c_str());
            std::fflush(stderr);
        }
        log.lines.push_back({log.level, log.partial});
        if (log.lines.size() > max_lines) {
            log.lines.pop_front();
        }
    }
    log.partial.clear();
}

void on_log(ggml_log_level level, const char * text, void *) {
    fitter::guarded(false, [&] {
        log_state &                 log = state();
        std::lock_guard<std::mutex> lock(log.mutex);
        if (level != GGML_LOG_LEVEL_CONT) {
            finish_line(log);
            log.level = level;
        }
        while (const char * end = std::strchr(text, '\n')) {
            log.partial.append(text, end);
            finish_line(log);
            text = end + 1;
        }
        log.partial.append(text);
        return true;
    });
}

}  // namespace

void fitter_log_capture(void) { llama_log_set(on_log, nullptr); }

void fitter_log_clear(void) {
    log_state &                 log = state();
    std::lock_guard<std::mutex> lock(log.mutex);
    log.lines.clear();
    log.partial.clear();
}

int32_t fitter_log_count(void) {
    log_state &                 log = state();
    std::lock_guard<std::mutex> lock(log.mutex);
    return static_cast<int32_t>(log.lines.size());
}

int32_t fitter_log_line(int32_t i, char * out, size_t size) {
    log_state &                 log = state();
    std::lock_guard<std::mutex> lock(log.mutex);
    if (i < 0 || static_cast<size_t>(i) >= log.lines.size() || size == 0) {
        return -1;
    }
    const line & found = log.lines[static_cast<size_t>(i)];
    std::snprintf(out, size, "%s", found.text.c_str());
    return found.level;
}
