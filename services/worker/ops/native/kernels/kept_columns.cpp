#include "kept_columns.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lockstep {
namespace {

// A column and its logit, or what became of it. Of equals, the lower column comes first.
template <class T>
struct Entry {
    T value;
    int64_t column;

    bool operator<(const Entry& other) const {
        return value > other.value || (value == other.value && column < other.column);
    }
};

// The `count` largest. Entries are collected until they are twice as many, and then halved: what comes later must exceed
// the smallest of them.
std::vector<int64_t> largest(const float* logits, int64_t num_columns, int64_t count) {
    std::vector<Entry<float>> entries;
    entries.reserve(2 * count);
    float edge = -INFINITY;
    const auto halve = [&] {
        std::nth_element(entries.begin(), entries.begin() + count - 1, entries.end());
        entries.resize(count);
        edge = entries.back().value;
    };
    for (int64_t column = 0; column < num_columns; ++column) {
        // The first ones are taken whatever they are, as there must be so many.
        if (logits[column] > edge || column < count) entries.push_back({logits[column], column});
        if (static_cast<int64_t>(entries.size()) == 2 * count) halve();
    }
    halve();
    std::vector<int64_t> columns;
    for (const auto& entry : entries) columns.push_back(entry.column);
    return columns;
}

class Narrowing {
public:
    Narrowing(const float* logits, float highest, double temperature)
        : logits_(logits), highest_(static_cast<double>(highest) / temperature), temperature_(temperature) {}

    // Columns at least `min_p` times as probable as the best (Nguyen et al., arXiv:2407.01082, section 3).
    void keep_above_share(std::vector<int64_t>& columns, double min_p) const {
        // Exponentials are dear, and few columns are near enough to need one.
        const double least = std::log(min_p) - 1e-6;
        std::erase_if(columns, [&](int64_t column) {
            return !(exponent(column) >= least) || !(std::exp(exponent(column)) >= min_p);
        });
    }

    // The fewest most probable columns that together reach `top_p` (Holtzman et al., arXiv:1904.09751, section 3.1).
    void keep_nucleus(std::vector<int64_t>& columns, double top_p) const {
        std::vector<double> weights(columns.size());
        std::transform(columns.begin(), columns.end(), weights.begin(), [&](int64_t column) {
            return std::exp(exponent(column));
        });
        const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
        // Columns below this share together hold less than 1 - top_p, so they need not be sorted.
        const double least = total * (1.0 - top_p) / (2 * static_cast<double>(columns.size()));
        std::vector<Entry<double>> likely;
        for (size_t i = 0; i < columns.size(); ++i) {
            if (weights[i] >= least) likely.push_back({weights[i], columns[i]});
        }
        std::sort(likely.begin(), likely.end());
        columns.clear();
        double held = 0.0;
        for (const auto& entry : likely) {
            if (held >= top_p * total) break;
            columns.push_back(entry.column);
            held += entry.value;
        }
    }

private:
    double exponent(int64_t column) const { return static_cast<double>(logits_[column]) / temperature_ - highest_; }

    const float* const logits_;
    const double highest_, temperature_;
};

}  // namespace

std::vector<int64_t> kept_columns(const float* logits, int64_t num_columns, float highest, const Filters& filters) {
    std::vector<int64_t> columns;
    if (filters.top_k > 0 && filters.top_k < num_columns) {
        columns = largest(logits, num_columns, filters.top_k);
    } else {
        columns.resize(num_columns);
        std::iota(columns.begin(), columns.end(), 0);
    }
    // The best column survives each of them, so the largest logit remains the same.
    const Narrowing narrowing(logits, highest, filters.temperature);
    if (filters.min_p > 0) narrowing.keep_above_share(columns, filters.min_p);
    if (filters.top_p < 1) narrowing.keep_nucleus(columns, filters.top_p);
    std::sort(columns.begin(), columns.end());
    return columns;
}

}  // namespace lockstep
