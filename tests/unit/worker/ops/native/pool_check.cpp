// Runs many jobs of all shapes on the pool, from two threads, and checks that each piece ran once and in its phase.
//
// Built with the thread sanitizer by test_pool.py, which then finds every unsynchronised access.
#include "pool.h"

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

extern "C" void ls_set_num_threads(int64_t count);

namespace {

std::atomic<bool> is_wrong{false};

// Pieces write plain memory, as kernels do; each phase reads what the one before it has written.
void run_job(int64_t first, int64_t second, int64_t third) {
    std::vector<int64_t> inputs(first), sums(second, 0), outputs(third, 0);
    lockstep::run_phases(
        lockstep::num_threads(),
        lockstep::Phase{first, [&](int64_t piece) { inputs[piece] += piece + 1; }},
        lockstep::Phase{second, [&](int64_t piece) {
            for (const int64_t input : inputs) sums[piece] += input;
        }},
        lockstep::Phase{third, [&](int64_t piece) {
            for (const int64_t sum : sums) outputs[piece] += sum;
        }});
    const int64_t expected = second * first * (first + 1) / 2;
    for (const int64_t output : outputs) {
        if (output != expected) is_wrong = true;
    }
}

void run_jobs(int64_t count) {
    for (int64_t job = 0; job < count; ++job) run_job(job % 7, job % 5, job % 11);
}

}  // namespace

int main() {
    for (int64_t num_threads = 1; num_threads <= 4; ++num_threads) {
        ls_set_num_threads(num_threads);
        std::thread other(run_jobs, 300);
        run_jobs(3000);
        other.join();
    }
    std::puts(is_wrong ? "wrong" : "ok");
}
