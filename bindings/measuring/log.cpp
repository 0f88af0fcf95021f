// llama.cpp's log, captured without a way through Python: a dummy load writes thousands of lines.

#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

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
    if (!log.partial.empty()) {
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
        if (log.level == GGML_LOG_LEVEL_DEBUG) {
            return true;
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

void fitter_log_capture(void) {
    fitter::guarded([] { llama_log_set(on_log, nullptr); });
}

void fitter_log_clear(void) {
    fitter::guarded([&] {
        log_state &                 log = state();
        std::lock_guard<std::mutex> lock(log.mutex);
        log.lines.clear();
        log.partial.clear();
    });
}

bool fitter_log_lines(fitter_columns_t * out) {
    return fitter::guarded(false, [&] {
        thread_local std::string          texts;
        thread_local std::vector<int64_t> levels;

        log_state &                 log = state();
        std::lock_guard<std::mutex> lock(log.mutex);
        texts.clear();
        levels.clear();
        for (const line & found : log.lines) {
            // Without what follows a NUL of its own.
            texts.append(found.text.c_str()).push_back('\0');
            levels.push_back(found.level);
        }
        *out = {texts.data(), texts.size(), levels.data(), levels.size()};
        return true;
    });
}
