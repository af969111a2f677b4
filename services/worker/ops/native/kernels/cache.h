// How heads are stored in the paged cache in 8 bits: codes of one byte, and a scale for each token and head.
#pragma once

#include "simd.h"

namespace lockstep {

// Writes codes in [-127, 127] and returns the scale that gives back the values: `code * scale`. A head with a value that is
// not finite has a scale of NaN. `values` may be read up to the next multiple of kWidth.
inline float quantise(const float* values, int8_t* codes, int64_t dim) {
    Vec largest = zeros(), not_finite = zeros();
    for_vectors(dim, [&](int64_t i, int64_t count) {
        const Vec part = load_up_to(values + i, count);
        largest = max(largest, abs(part));
        // Infinity less infinity is NaN.
        not_finite = add(not_finite, sub(part, part));
    });
    const float scale = max_of(largest) / 127.0f;
    const Vec inverse = broadcast(scale > 0 ? 1.0f / scale : 0.0f);
    const Vec limit = broadcast(127.0f), lower = broadcast(-127.0f);
    for_vectors(dim, [&](int64_t i, int64_t count) {
        const Vec scaled = mul(load_up_to(values + i, count), inverse);
        store_up_to(codes + i, max(lower, min(limit, scaled)), count);
    });
    return scale + sum(not_finite);
}

}  // namespace lockstep
