// Which columns of a row of logits survive top-k, min-p and top-p.
#pragma once

#include <vector>

#include "abi.h"

namespace lockstep {

struct Filters {
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
