#include "pool.h"

#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "abi.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread without work looks for the next kernel before it sleeps: longer than Python needs between two.
constexpr auto kIdleSpin = std::chrono::microseconds(100);
// How long a thread looks for the end of others' pieces before it sleeps. When it sleeps, a thread that the system has
// stopped can go on in its place.
constexpr auto kWaitSpin = std::chrono::microseconds(20);

thread_local int64_t own_number = 0;

// A number that threads wait for. Sleepers are counted, as waking costs a system call even if there are none.
class Signal {
public:
    uint32_t load() const { return value_.load(std::memory_order_acquire); }
    // While no thread waits.
    void reset() { value_.store(0, std::memory_order_relaxed); }

    // A full barrier: either a thread that is about to sleep sees the new value, or it is seen as a sleeper.
    uint32_t increment() { return value_.fetch_add(1, std::memory_order_seq_cst) + 1; }
    void wake() {
        if (num_sleepers_.load(std::memory_order_seq_cst) > 0) value_.notify_all();
    }

    // Waits until `is_over(value)`; sleeps only after `spin_for`.
    template <class Condition>
    void wait(Clock::duration spin_for, const Condition& is_over) {
        const auto end = Clock::now() + spin_for;
        do {
            for (int i = 0; i < 16; ++i) {
                if (is_over(load())) return;
                _mm_pause();
            }
        } while (Clock::now() < end);
        num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
        for (uint32_t value; !is_over(value = value_.load(std::memory_order_seq_cst));) value_.wait(value);
        num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int32_t> num_sleepers_{0};
};

class Pool {
public:
    // For the life of the process: threads may outlast whatever is destroyed at its end.
    static Pool& instance() {
        static Pool& pool = *new Pool;
        return pool;
    }

    int64_t num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

    void set_num_threads(int64_t count) {
        const std::lock_guard lock(callers_);
        for (; num_started_ < count; ++num_started_) {
            std::thread([this, number = num_started_] { work(number); }).detach();
        }
        num_threads_.store(count, std::memory_order_relaxed);
    }

    void run(const Job& job) {
        if (job.num_threads == 1) return run_alone(job);
        const std::unique_lock lock(callers_, std::try_to_lock);
        if (!lock) return run_alone(job);
        const uint32_t job_number = announced_.load() + 1;
        publish(job, job_number);
        take_pieces(job_number);
        wait_for(num_pieces());
    }

private:
    // The job's number in the high half, the next piece of it in the low half.
    using Ticket = uint64_t;
    static constexpr Ticket kPieceMask = 0xFFFFFFFF;

    static void run_alone(const Job& job) {
        for (int phase = 0; phase < job.num_phases; ++phase) {
            for (int64_t piece = 0; piece < job.counts[phase]; ++piece) job.run(job.phases, phase, piece);
        }
    }

    // All pieces of the former job are done.
    void publish(const Job& job, uint32_t job_number) {
        // No piece can be taken until the job is written. The thread that took the last one before has read what is overwritten.
        ticket_.exchange(Ticket{job_number} << 32 | kPieceMask, std::memory_order_acq_rel);
        num_done_.reset();
        run_.store(job.run, std::memory_order_relaxed);
        phases_.store(job.phases, std::memory_order_relaxed);
        max_threads_.store(job.num_threads, std::memory_order_relaxed);
        int64_t num_pieces = 0;
        for (int phase = 0; phase < kMaxPhases; ++phase) {
            if (phase < job.num_phases) num_pieces += job.counts[phase];
            ends_[phase].store(num_pieces, std::memory_order_relaxed);
        }
        ticket_.store(Ticket{job_number} << 32, std::memory_order_release);
        announced_.increment();
        announced_.wake();
    }

    void take_pieces(uint32_t job_number) {
        Ticket ticket = ticket_.load(std::memory_order_acquire);
        while (ticket >> 32 == job_number && own_number < max_threads_.load(std::memory_order_relaxed)) {
            const int64_t piece = static_cast<int64_t>(ticket & kPieceMask);
            if (piece >= num_pieces()) return;
            // The job cannot end while a piece is taken: what was read of it is valid if the ticket is unchanged.
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            run_piece(piece);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void run_piece(int64_t piece) {
        int phase = 0;
        int64_t start = 0;
        for (; piece >= end_of(phase); ++phase) start = end_of(phase);
        wait_for(start);
        const int64_t end = end_of(phase);
        run_.load(std::memory_order_relaxed)(phases_.load(std::memory_order_relaxed), phase, piece - start);
        if (num_done_.increment() == end) num_done_.wake();
    }

    int64_t num_pieces() const { return end_of(kMaxPhases - 1); }
    int64_t end_of(int phase) const { return ends_[phase].load(std::memory_order_relaxed); }

    // Wait until so many pieces are done, which end a phase.
    void wait_for(int64_t count) {
        if (num_done_.load() < count) num_done_.wait(kWaitSpin, [&](uint32_t done) { return done >= count; });
    }

    void work(int64_t number) {
        own_number = number;
        pthread_setname_np(pthread_self(), ("kernels-" + std::to_string(number)).c_str());
        uint32_t former = 0;
        for (;;) {
            announced_.wait(kIdleSpin, [&](uint32_t number) { return number != former; });
            former = announced_.load();
            take_pieces(former);
        }
    }

    std::mutex callers_;
    int64_t num_started_ = 1;
    std::atomic<int64_t> num_threads_{1};

    std::atomic<void (*)(const void*, int, int64_t)> run_{nullptr};
    std::atomic<const void*> phases_{nullptr};
    std::atomic<int64_t> max_threads_{0};
    // Where phases end, in pieces of the job; those that it does not have end with it.
    std::array<std::atomic<int64_t>, kMaxPhases> ends_{};
    // Apart, as all threads write them.
    alignas(64) std::atomic<Ticket> ticket_{0};
    alignas(64) Signal num_done_;
    // The number of the last job.
    alignas(64) Signal announced_;
};

}  // namespace

void run_job(const Job& job) { Pool::instance().run(job); }

int64_t num_threads() { return Pool::instance().num_threads(); }

int64_t thread_number() { return own_number; }

}  // namespace lockstep

LS_EXPORT int64_t ls_num_threads() { return lockstep::num_threads(); }

// Run kernels on so many threads from now on.
LS_EXPORT void ls_set_num_threads(int64_t count) { lockstep::Pool::instance().set_num_threads(count); }
