// Work split into pieces that threads take as they become free: one that the system has stopped holds up the others by
// no more than a piece.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "abi.h"

namespace lockstep::products {

// Hands out the numbers below `count`, in ascending order, each once.
class Pieces {
public:
    explicit Pieces(int64_t count) : count_(count) {}

    // Calls `body` with numbers until none is left.
    template <class Body>
    void take(const Body& body) {
        for (int64_t piece; (piece = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) body(piece);
    }

private:
    const int64_t count_;
    std::atomic<int64_t> next_{0};
};

// Memory that a thread reuses from call to call; it only grows.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }

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

// Runs `body()` on every thread of the pool, or only on this one.
template <class Body>
void on_threads(bool on_all, const Body& body) {
    if (on_all && omp_get_max_threads() > 1) {
#pragma omp parallel
        body();
    } else {
        body();
    }
}

// Waits for all threads that run the body of `on_threads`.
inline void wait_for_all() {
#pragma omp barrier
}

}  // namespace lockstep::products
