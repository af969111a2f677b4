// The threads that kernels run on, one pool for the process.
//
// A kernel is cut into pieces, which threads take as they become free. It is done when its pieces are done: it waits for
// no thread that has not taken one. So a thread that the system has stopped in favour of another process holds up the
// others by at most the piece that it has.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <tuple>

namespace lockstep {

// What a kernel consists of: `body(piece)` for the pieces [0, count), in any order, on any threads.
template <class Body>
struct Phase {
    int64_t count;
    Body body;
};
template <class Body>
Phase(int64_t, Body) -> Phase<Body>;

constexpr int kMaxPhases = 5;

// Phases of which each begins when the one before it is complete.
struct Job {
    void (*run)(const void* phases, int phase, int64_t piece);
    const void* phases;
    int num_phases;
    std::array<int64_t, kMaxPhases> counts;
    // Only threads with smaller numbers take pieces.
    int64_t num_threads;
};

// Run on the pool; on this thread alone if that is all the job may have, or while another one uses the pool. Returns when
// the job is done.
void run_job(const Job& job);

// How many threads a kernel runs on, the caller's included.
int64_t num_threads();

// Of the thread that runs a piece: the caller's is 0.
int64_t thread_number();

// Run phases on at most `threads` threads.
template <class... Bodies>
void run_phases(int64_t threads, const Phase<Bodies>&... phases) {
    static_assert(sizeof...(phases) <= kMaxPhases);
    const std::tuple<const Phase<Bodies>&...> all(phases...);
    const auto run_piece = [](const void* context, int number, int64_t piece) {
        std::apply(
            [&](const auto&... phase) {
                int index = 0;
                ((index++ == number ? static_cast<void>(phase.body(piece)) : static_cast<void>(0)), ...);
            },
            *static_cast<const std::tuple<const Phase<Bodies>&...>*>(context));
    };
    run_job({run_piece, &all, sizeof...(phases), {phases.count...}, threads});
}

// Calls `body(piece)` for the pieces [0, count), on at most `threads` threads.
template <class Body>
void for_pieces(int64_t count, int64_t threads, const Body& body) {
    run_phases(threads, Phase<const Body&>{count, body});
}

// Calls `body(row)` for rows [0, count), on several threads only if that is worth waking them.
//
// `cost` is a row's, in elements read or written; `worth` the total from which another thread saves time.
template <class Body>
void for_rows(int64_t count, int64_t cost, int64_t worth, const Body& body) {
    // More pieces than threads, so that one that comes late has less to do.
    const int64_t threads = count * cost < worth ? 1 : num_threads(), num_pieces = threads * 4;
    for_pieces(num_pieces, threads, [&](int64_t piece) {
        const int64_t stop = (piece + 1) * count / num_pieces;
        for (int64_t row = piece * count / num_pieces; row < stop; ++row) body(row);
    });
}

// Memory that a thread reuses from call to call; it only grows.
class Buffer {
public:
    ~Buffer() { std::free(memory_); }

    // 64-byte aligned; what it had before is lost.
    uint8_t* reserve(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + 4095) / 4096 * 4096;
            memory_ = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(size_)));
            if (!memory_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return memory_;
    }

private:
    uint8_t* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace lockstep
