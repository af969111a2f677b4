// Work split over the threads of torch's OpenMP runtime.
#pragma once

#include <omp.h>

#include "abi.h"

namespace lockstep {

// Calls `body(row)` for rows [0, count), on several threads only if that is worth waking them.
//
// `cost` is a row's, in elements read or written; `worth` the total from which another thread saves time.
template <typename Body>
void for_rows(int64_t count, int64_t cost, int64_t worth, Body body) {
    if (count < 2 || count * cost < worth || omp_get_max_threads() < 2) {
        for (int64_t row = 0; row < count; ++row) {
            body(row);
        }
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; ++row) {
        body(row);
    }
}

}  // namespace lockstep
