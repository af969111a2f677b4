// Draws a token of each row: argmax of logit / temperature + Gumbel noise, with the noise of `drawing/noise.py`.
//
// Noise is -log(-log(u)), which is at most -log(1 - u). A column whose score cannot reach the best one by that bound, which
// needs no logarithm, is passed over: all but a few.
#include <algorithm>
#include <cmath>

#include "kept_columns.h"
#include "pool.h"
#include "simd.h"

namespace lockstep {
namespace {

struct DrawArgs {
    const float* logits;
    int64_t row_stride, num_columns;
    // [num_rows]: which rows are drawn.
    const int64_t* rows;
    int64_t num_rows;
    // By row of `logits`.
    DrawRows draws;
    // By row of `logits`: the column of its largest logit, which is finite; then the drawn one.
    int64_t* token_ids;
};

// Words of a block, for as many columns.
constexpr int64_t kWords = 4;
constexpr int64_t kColumns = 16;
// Above the rounding of what is compared, and of the exponential.
constexpr float kMargin = 1.001f;

// Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3).
struct Philox {
    uint64_t first_key, second_key, position;

    void block(uint64_t number, uint64_t* words) const {
        uint64_t a = number, b = position, c = 0, d = 0, first = first_key, second = second_key;
        for (int round = 0; round < 10; ++round) {
            const auto left = static_cast<unsigned __int128>(a) * 0xD2E7470EE14C6C93u;
            const auto right = static_cast<unsigned __int128>(c) * 0xCA5A826395121157u;
            a = static_cast<uint64_t>(right >> 64) ^ b ^ first, b = static_cast<uint64_t>(right);
            c = static_cast<uint64_t>(left >> 64) ^ d ^ second, d = static_cast<uint64_t>(left);
            first += 0x9E3779B97F4A7C15u, second += 0xBB67AE8584CAA73Bu;
        }
        words[0] = a, words[1] = b, words[2] = c, words[3] = d;
    }
};

double gumbel(uint64_t word) { return -std::log(-std::log((static_cast<double>(word >> 11) + 0.5) * 0x1p-53)); }

class Row {
public:
    Row(const DrawArgs& args, int64_t row)
        : logits_(args.logits + row * args.row_stride),
          num_columns_(args.num_columns),
          filters_(args.draws, row),
          // The key's second word has the noise's purpose, which is 0, above the choice.
          philox_{static_cast<uint64_t>(args.draws.seed[row]), static_cast<uint64_t>(args.draws.choice[row]),
                  static_cast<uint64_t>(args.draws.position[row])},
          largest_(args.token_ids[row]),
          factor_(static_cast<float>(static_cast<double>(kLog2E) / filters_.temperature)) {}

    int64_t draw() {
        return filters_.keep_all(num_columns_) ? draw_from_all() : draw_from_kept();
    }

private:
    int64_t draw_from_kept() {
        uint64_t words[kWords];
        int64_t block = -1;
        for (const int64_t column : kept_columns(logits_, num_columns_, logits_[largest_], filters_)) {
            if (column / kWords != block) philox_.block(block = column / kWords, words);
            consider(column, words[column % kWords]);
        }
        return best_;
    }

    int64_t draw_from_all() {
        uint64_t words[kColumns];
        philox_.block(largest_ / kWords, words);
        consider(largest_, words[largest_ % kWords]);
        for (int64_t column = 0; column < num_columns_; column += kColumns) {
            for (int64_t i = 0; i < kColumns; i += kWords) philox_.block((column + i) / kWords, words + i);
            for (int64_t i = 0; i < kColumns; i += kWidth) {
                const int64_t count = num_columns_ - column - i;
                if (count <= 0) break;
                consider_vector(column + i, std::min(count, kWidth), words + i);
            }
        }
        return best_;
    }

    double scaled(int64_t column) const { return static_cast<double>(logits_[column]) / filters_.temperature; }

    void consider(int64_t column, uint64_t word) {
        const double score = scaled(column) + gumbel(word);
        if (score > score_ || (score == score_ && column < best_)) score_ = score, best_ = column;
    }

    void consider_vector(int64_t column, int64_t count, const uint64_t* words) {
        // 1 - u, rounded down.
        float distances[kWidth];
        for (int64_t i = 0; i < kWidth; ++i) distances[i] = static_cast<float>(static_cast<int32_t>(~words[i] >> 33));
        // The highest logit is subtracted first, which loses no digits of those that matter.
        const double lead = score_ - scaled(largest_);
        const Vec below = sub(load_up_to(logits_ + column, count), broadcast(logits_[largest_]));
        const Vec exponents = sub(mul(below, broadcast(factor_)), broadcast(static_cast<float>(lead * kLog2E)));
        const Vec reach = mul(exp2(exponents), broadcast(kMargin));
        uint32_t found = at_most_bits(mul(load(distances), broadcast(0x1p-31f)), reach);
        found &= count < kWidth ? (1u << count) - 1 : ~0u;
        for (; found; found &= found - 1) {
            const int64_t i = __builtin_ctz(found);
            consider(column + i, words[i]);
        }
    }

    const float* const logits_;
    const int64_t num_columns_;
    const Filters filters_;
    const Philox philox_;
    const int64_t largest_;
    // From a difference of logits to a power of 2.
    const float factor_;
    int64_t best_ = 0;
    double score_ = -INFINITY;
};

}  // namespace
}  // namespace lockstep

using namespace lockstep;

// Draws the tokens of some rows.
LS_EXPORT void ls_draw(const DrawArgs* args) {
    for_pieces(args->num_rows, num_threads(), [&](int64_t i) {
        const int64_t row = args->rows[i];
        args->token_ids[row] = Row(*args, row).draw();
    });
}
