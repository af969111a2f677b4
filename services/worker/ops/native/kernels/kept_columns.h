// Which columns of a row of logits survive top-k, min-p and top-p.
#pragma once

#include <vector>

#include "abi.h"

namespace lockstep {

// How the rows are drawn: a column for each of `DrawRows` in `ops/arguments.py`, of the same name and dtype, in its order.
struct DrawRows {
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const int64_t* seed;
    const int64_t* choice;
    const int64_t* position;
};

struct Filters {
    Filters(const DrawRows& draws, int64_t row)
        : temperature(draws.temperature[row]),
          top_k(draws.top_k[row]),
          top_p(draws.top_p[row]),
          min_p(draws.min_p[row]) {}

    double temperature;
    int64_t top_k;  // 0: all
    double top_p;   // 1: all
    double min_p;   // 0: all

    bool keep_all(int64_t num_columns) const {
        return (top_k <= 0 || top_k >= num_columns) && top_p >= 1 && min_p <= 0;
    }
};

// The columns, ascending; those of `TokenDraw.kept_columns`. `highest` is the largest logit, which is finite.
std::vector<int64_t> kept_columns(const float* logits, int64_t num_columns, float highest, const Filters& filters);

}  // namespace lockstep
