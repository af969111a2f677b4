// What the machine can do at most, to compare the products with: `tests/bench/native_ops.py`.
#include <atomic>

#include "pool.h"
#include "tiles_int.h"

namespace lockstep::products {

namespace {

constexpr int64_t kReadBytes = 64 << 10;
// Independent sums, so that the processor does not wait for results.
constexpr int kChains = 12;

}  // namespace

struct ReadCall {
    const uint8_t* source;  // of a multiple of 64 KiB
    int64_t bytes;
    int64_t* sum;  // written, so that the reads have a result
};

// Reads memory once, on all threads, as products do.
LS_EXPORT void ls_read(const ReadCall* call) {
    std::atomic<int64_t> total{0};
    for_pieces(call->bytes / kReadBytes, num_threads(), [&](int64_t piece) {
        Ints sum = fill_ints(0);
        const Bytes ones = repeat_word("\1\1\1\1");
        const uint8_t* source = call->source + piece * kReadBytes;
        for (int64_t offset = 0; offset < kReadBytes; offset += 128) {
            prefetch(source + offset + 1024, 128);
            sum = dot_unsigned(sum, load_bytes(source + offset), ones, load_bytes(source + offset + 64), ones);
        }
        total += sum_lanes(sum);
    });
    *call->sum = total;
}

struct DotCall {
    int64_t num_rounds;
    int64_t* num_products;  // written: products of two bytes that all threads have added up
    int64_t* sum;           // likewise
};

// Multiplies integers in registers, on all threads.
LS_EXPORT void ls_dot(const DotCall* call) {
    std::atomic<int64_t> total{0}, num_products{0};
    for_pieces(num_threads(), num_threads(), [&](int64_t) {
        Ints sums[kChains];
        // All different, or the compiler would add up only one of them.
        for (int i = 0; i < kChains; ++i) sums[i] = fill_ints(i);
        Bytes weights = repeat_word("\1\2\3\4");
        for (int64_t round = 0; round < call->num_rounds; ++round) {
            // The compiler must not know the weights either, or it would multiply only once.
#ifdef __AVX512VNNI__
            asm volatile("" : "+v"(weights.v));
#else
            asm volatile("" : "+x"(weights.low), "+x"(weights.high));
#endif
            for (Ints& sum : sums) sum = dot_int8(sum, weights, weights, weights, weights);
        }
        for (const Ints& sum : sums) total += sum_lanes(sum);
        num_products += call->num_rounds * kChains * 2 * 64;
    });
    *call->sum = total;
    *call->num_products = num_products;
}

}  // namespace lockstep::products
